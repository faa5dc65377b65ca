"""Questions and completions to tokens and back, with the policy's own tokenizer.

A completion of another node arrives as text and becomes tokens here: chat template for the question, then the text,
then our end-of-sequence token if it ended. Text from a stranger never becomes a control token.
"""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError

from sapo_node.rollouts.schema import Finish

DEFAULT_TEMPLATE = "Question: {question}\nAnswer:"
"""For tokenizers without a chat template, as base models have it."""

# Stands for the question while the template is rendered. No template and no system prompt contains it by chance.
_MARK = "sapo-question-7c1f4e"


TEMPLATE_SECONDS = 10.0
"""For rendering a chat template, which takes milliseconds. The sandbox of transformers ends no loops."""


MAX_TOKEN_CHARS = 64
"""Characters a token stands for at most, as far as a text is read, unless the vocabulary has longer ones; runs of
blanks in large vocabularies come near."""

PIECE_CHARS = 4
"""Characters that are read first for each token of the limit, to see whether a text is too long. With fewer, usual
texts that fit would be encoded twice; with more, a stranger's text costs more before it is given up."""


class Untrainable(ValueError):
    """A text that this policy cannot be trained on; the message says why."""


class Encoder:
    """The policy's tokenizer with one chat template and one system prompt."""

    def __init__(self, tokenizer: Any, eos_token_id: int, system_prompt: str = "") -> None:
        """`tokenizer` is a transformers tokenizer; `eos_token_id` ends completions that are re-encoded."""
        self._tokenizer = tokenizer
        self._eos = eos_token_id
        self._system = system_prompt
        self.notes: list[str] = []
        special = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self._longest = max(MAX_TOKEN_CHARS, *map(len, tokenizer.get_vocab()))
        self._control_texts = sorted(special.values())
        self._control_ids = {*special, eos_token_id} - {tokenizer.unk_token_id}  # unknown text is still only text
        with _within(TEMPLATE_SECONDS):
            self._parts = self._render().split(_MARK)
        if len(self._parts) < 2:
            raise ValueError("the tokenizer's chat template drops the user's message; correct chat_template.jinja")

    def prompt(self, question: str) -> list[int]:
        """Tokens of a question as the policy is asked it, up to where its answer begins.

        The rendered template is encoded in one go, as the model saw it in its own training. Only where the question
        holds the text of a control token is it encoded apart, as plain text.
        """
        add_bos = not self._tokenizer.chat_template
        if not any(text in question for text in self._control_texts):
            ids = self._encode(question.join(self._parts), add_special_tokens=add_bos)
        else:
            middle = self.completion(question, "length")
            ids = self._encode(self._parts[0], add_special_tokens=add_bos)
            for part in self._parts[1:]:
                ids += middle + self._encode(part, add_special_tokens=False)
        return ids[:-1] if add_bos and ids and ids[-1] == self._eos else ids

    def completion(self, text: str, finish: Finish) -> list[int]:
        """Tokens of one completion; see `completions`."""
        return self.completions([text], [finish])[0]

    def completions(self, texts: Sequence[str], finishes: Sequence[Finish]) -> list[list[int]]:
        """Tokens of completions that are known as text, the end-of-sequence token behind those that stopped.

        Raises Untrainable for a tokenizer that cannot keep text and control apart.
        """
        if not texts:  # which transformers' tokenizers do not take
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if any(not self._control_ids.isdisjoint(ids) for ids in encoded):
            raise Untrainable("this tokenizer turns plain text into control tokens")
        return [
            [*ids, self._eos] if finish == "stop" else list(ids) for ids, finish in zip(encoded, finishes, strict=True)
        ]

    def at_most(self, limit: int, texts: Sequence[str], finishes: Sequence[Finish]) -> list[tuple[list[int], bool]]:
        """As `completions`, of each the first `limit` tokens and whether it has more."""
        beginnings = [self.beginning(text, limit) for text in texts]
        short = [index for index, beginning in enumerate(beginnings) if beginning is None]
        whole = self.completions([texts[index] for index in short], [finishes[index] for index in short])
        read = dict(zip(short, whole, strict=True))
        return [
            (read[index][:limit], len(read[index]) > limit) if beginning is None else (beginning, True)
            for index, beginning in enumerate(beginnings)
        ]

    def beginning(self, text: str, limit: int) -> list[int] | None:
        """Up to `limit` tokens of a text that has more; None where it has to be encoded as a whole to know.

        A stranger's text may be long for nothing, so its end is not read. Beginnings of it are encoded, each twice as
        long as the one before, up to one that has far too many tokens: its cut may go through a token, which then
        becomes as many as it has characters.
        """
        read, tokens = PIECE_CHARS * limit, list[int]()
        if len(text) <= read:
            return None
        while len(tokens) <= 2 * limit + self._longest:
            tokens = self.completion(text[:read], "length")
            if read >= min(len(text), self._longest * limit):
                return tokens[:limit] if len(text) > self._longest * limit else None
            read *= 2
        return tokens[:limit]

    def decode(self, token_ids: Sequence[Sequence[int]]) -> list[str]:
        """Texts of completions, without special tokens and otherwise exactly as the tokens spell them."""
        return [
            self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in token_ids
        ]

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _render(self) -> str:
        """The whole prompt around `_MARK`."""
        if not self._tokenizer.chat_template:
            self.notes.append(
                "the tokenizer has no chat template; questions are put as "
                + repr(DEFAULT_TEMPLATE.format(question="..."))
            )
            return (self._system + "\n\n" if self._system else "") + DEFAULT_TEMPLATE.format(question=_MARK)
        user = {"role": "user", "content": _MARK}
        if self._system:
            try:
                rendered = self._apply([{"role": "system", "content": self._system}, user])
            except TemplateError:  # how templates without a system role say so
                rendered = ""
            if self._system.strip() in rendered:
                return rendered
            self.notes.append("the chat template knows no system role; inference.system_prompt is not used")
        return self._apply([user])

    def _apply(self, messages: list[dict[str, str]]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise ValueError in the middle of rendering after so long. Outside the main thread, where no signal arrives, a
    template has the deadline of the call."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise ValueError(f"it was not rendered after {seconds:g} s; correct chat_template.jinja")

    handler, timer = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
