"""JSONL data sets: one {"question": ..., "answer": ...} a line, and a verifier that judges answers to them.

A data set's version is the digest of its file, so two nodes mean the same rows by the same coordinates. Rows whose
question belongs to evaluation (base.is_eval_question) are withheld from training, like every such question.
"""

import hashlib
import io
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from sapo_node.errors import SapoError
from sapo_node.tasks.base import Question, is_eval_question, question_sha256
from sapo_node.tasks.verifiers import Verifier, readable_truth

MAX_FILE_BYTES: Final = 256 << 20
"""Rows are kept in memory; a larger file is better split by topic."""

MAX_LINE_BYTES: Final = 128 * 1024
MAX_QUESTION_BYTES: Final = 32 * 1024
MAX_ANSWER_BYTES: Final = 4 * 1024
"""What fits into a prompt, and what a verifier compares."""


class DatasetError(SapoError):
    """A data set cannot be used; the message names file and line and what to do."""


class Row(Struct, frozen=True, kw_only=True):
    """One problem with its truth."""

    question: str
    answer: str

    def asked(self) -> Question:
        """The question as everybody addresses it."""
        return Question(text=self.question, sha256=question_sha256(self.question))


class Dataset(Struct, frozen=True, kw_only=True):
    """The rows of a file, split by the swarm's rule into those to train on and those to evaluate with."""

    rows: list[Row]  # to train on, in the file's order
    eval_rows: list[Row]  # withheld from training
    version: str  # sha256 of the file's bytes, in hex

    @property
    def withheld(self) -> int:
        """Rows that training never sees."""
        return len(self.eval_rows)

    def row(self, seed: int) -> Row:
        """The row that a seed addresses: seed modulo the rows to train on."""
        return self.rows[seed % len(self.rows)]


class _Line(Struct):
    """What a line must hold; other fields are ignored. Numbers are taken as answers, as many data sets have them."""

    question: str
    answer: str | int | float


def load(path: Path, verifier: Verifier = "exact") -> Dataset:
    """Read a JSONL file. Raises DatasetError (`rows.jsonl:17: ...`) for the first row that cannot be used."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise DatasetError(f"{path}: {size} bytes are more than {MAX_FILE_BYTES}; split the file")
        data = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror}") from error
    rows: list[Row] = []
    eval_rows: list[Row] = []
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(io.BytesIO(data), start=1):  # one at a time: empty ones would fill the memory
        if line.strip():
            try:
                row = _row(line.rstrip(b"\n"), decoder, verifier)
            except ValueError as error:
                raise DatasetError(f"{path}:{number}: {error}") from error
            (eval_rows if is_eval_question(question_sha256(row.question)) else rows).append(row)
    if not rows:
        found = f"all {len(eval_rows)} rows belong to evaluation; add more" if eval_rows else "no rows; add some"
        raise DatasetError(f"{path}: nothing to train on: {found}")
    return Dataset(rows=rows, eval_rows=eval_rows, version=hashlib.sha256(data).hexdigest())


def _row(line: bytes, decoder: msgspec.json.Decoder[_Line], verifier: Verifier) -> Row:
    """One checked row; raises ValueError for people (msgspec's errors are ValueErrors)."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"a line of {len(line)} bytes is longer than {MAX_LINE_BYTES}; shorten it or leave it out")
    try:
        read = decoder.decode(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}); save the file as UTF-8") from error
    except RecursionError as error:
        raise ValueError("nested too deeply; a line is one flat JSON object") from error
    except msgspec.ValidationError as error:
        raise ValueError(f'{error}; a line is {{"question": "...", "answer": "..."}}') from error
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON ({error}); a line holds one JSON object") from error
    answer = read.answer if isinstance(read.answer, str) else repr(read.answer)
    if not read.question.strip() or not answer.strip():
        raise ValueError("question or answer is empty; fill it in or remove the line")
    for what, text, limit in (("question", read.question, MAX_QUESTION_BYTES), ("answer", answer, MAX_ANSWER_BYTES)):
        if len(text.encode()) > limit:
            raise ValueError(f"the {what} is longer than {limit} bytes; shorten it or leave the line out")
    if (problem := readable_truth(verifier, answer)) is not None:
        raise ValueError(f"{problem}; mend the line or choose another verifier")
    return Row(question=read.question, answer=answer)
