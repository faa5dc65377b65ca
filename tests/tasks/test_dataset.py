"""Data sets from JSONL files, and what is said about files that cannot be used."""

import hashlib
import json
import tracemalloc
from pathlib import Path

import pytest

from sapo_node.tasks import dataset
from sapo_node.tasks.base import is_eval_question, question_sha256
from sapo_node.tasks.dataset import DatasetError, load
from sapo_node.tasks.verifiers import Verifier

GOOD = '{"question": "1 + 1?", "answer": "2"}'


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def test_rows_are_split_by_the_swarms_rule(tmp_path: Path) -> None:
    path = write(tmp_path, *(json.dumps({"question": f"What is {n} + 0?", "answer": n}) for n in range(500)))
    data = load(path, "numeric")
    assert len(data.rows) + data.withheld == 500
    assert 25 < data.withheld < 80
    assert all(is_eval_question(question_sha256(row.question)) for row in data.eval_rows)
    assert not any(is_eval_question(row.asked().sha256) for row in data.rows)


def test_a_seed_takes_the_row_modulo_the_rows(tmp_path: Path) -> None:
    data = load(write(tmp_path, *(json.dumps({"question": f"q{n}", "answer": "a"}) for n in range(20))))
    assert data.row(len(data.rows) + 3) == data.rows[3]


def test_the_version_is_the_digest_of_the_bytes(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "")
    assert load(path).version == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("line", "verifier", "told"),
    [
        ("{", "exact", "not JSON .*one JSON object"),
        ("[]", "exact", 'Expected `object`, got `array`.*a line is {"question"'),
        ('{"question": "q"}', "exact", "missing required field `answer`"),
        ('{"question": "q", "answer": null}', "exact", "got `null`"),
        ('{"question": " ", "answer": "a"}', "exact", "empty; fill it in"),
        ('{"question": "q", "answer": "many"}', "numeric", "needs a finite number as answer, not 'many'"),
        ('{"question": "q", "answer": "both"}', "choice", "needs one letter"),
        (b'{"question": "\xff", "answer": "a"}', "exact", "UTF-8"),
        (json.dumps({"question": "q" * 40_000, "answer": "a"}), "exact", "the question is longer than 32768"),
        (json.dumps({"question": "q" * 200_000, "answer": "a"}), "exact", "longer than 131072"),
        (json.dumps({"question": "q", "answer": "a" * 5000}), "exact", "the answer is longer than 4096"),
    ],
)
def test_a_broken_row_is_told_with_file_and_line(
    tmp_path: Path, line: str | bytes, verifier: Verifier, told: str
) -> None:
    path = write(tmp_path, '{"question": "1 + 1?", "answer": "2"}' if verifier != "choice" else "", "", line)
    with pytest.raises(DatasetError, match=rf"rows\.jsonl:3: .*{told}"):
        load(path, verifier)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="cannot be read: No such file"):
        load(tmp_path / "rows.jsonl")


def test_an_empty_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no rows; add some"):
        load(write(tmp_path, "", " "))


def test_a_file_of_evaluation_rows_only_is_told(tmp_path: Path) -> None:
    question = next(q for q in (f"q{n}" for n in range(1000)) if is_eval_question(question_sha256(q)))
    with pytest.raises(DatasetError, match="all 1 rows belong to evaluation"):
        load(write(tmp_path, json.dumps({"question": question, "answer": "a"})))


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "MAX_FILE_BYTES", 10)
    with pytest.raises(DatasetError, match="more than 10; split the file"):
        load(write(tmp_path, GOOD))


def test_blank_lines_take_no_memory_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n" * (4 << 20) + GOOD.encode())
    tracemalloc.start()
    try:
        assert len(load(path, "numeric").rows) == 1
        assert tracemalloc.get_traced_memory()[1] < 16 << 20  # the file, and a list of its lines was 64 MiB more
    finally:
        tracemalloc.stop()
