"""A tokenizer that makes template prompts short: byte-level BPE with few merges, plus whole phrases as tokens.

ReasoningGYM's questions are templates with a few varying places (numbers, weekdays, variables). Every stretch between
two varying places that occurs often becomes one token, so a prompt of 600 characters has about 20 tokens and a model of
half a million parameters can read it. All bytes stay in the vocabulary: any text can be encoded and decoded again.
"""

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November"]
NAMES = [*WEEKDAYS, *MONTHS, "December"]

# What varies inside a template: names, numbers digit by digit, operators, single capital letters.
VARYING = re.compile(rf"({'|'.join(NAMES)}|\d|[-+*/=()¬∧∨→↔]|\b[A-Z]\b)")
SENTENCE_END = re.compile(r"(?<=[.?!] )|(?<=\n)")

# Words of ASCII letters, single digits, other marks; each with the space before it. A number is its digits.
PIECES = Regex(r" ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]|\s+")

SURE = 0.95  # a piece is glued to what follows it in at least this share of its occurrences


@dataclass(frozen=True)
class TokenizerStyle:
    """What distinguishes the tokenizers of two model families."""

    merges: int  # BPE merges beyond the 256 bytes
    glue_sentences: bool  # whether a phrase may run over sentence ends
    eos: str
    pad: str
    question: str  # put before a question
    answer: str  # put between question and answer


def _glue(pieces: list[list[str]]) -> list[list[str]]:
    """Join each piece that is more than a varying place with its successor where the successor is practically sure."""
    while True:
        count: Counter[str] = Counter()
        pairs: Counter[tuple[str, str]] = Counter()
        for sequence in pieces:
            count.update(sequence)
            pairs.update(pairwise(sequence))
        sure = {
            left: right
            for (left, right), n in pairs.items()
            if len(left) > 2 and left not in NAMES and n >= max(20, SURE * count[left])
        }
        if not sure:
            return pieces
        glued = []
        for sequence in pieces:
            joined: list[str] = []
            previous = None  # the last piece as it was before gluing: one join a pass, or counts would not fit
            for piece in sequence:
                if previous is not None and sure.get(previous) == piece:
                    joined[-1] += piece
                    previous = None
                else:
                    joined.append(piece)
                    previous = piece
            glued.append(joined)
        pieces = glued


def find_phrases(questions: list[str], style: TokenizerStyle, limit: int = 110) -> list[str]:
    """The stretches of templates worth a token of their own, those that save the most characters first."""
    pieces = []
    for question in questions:
        sentences = [part for part in SENTENCE_END.split(question) if part]
        pieces.append([piece for sentence in sentences for piece in VARYING.split(sentence) if piece])
    if style.glue_sentences:
        pieces = _glue(pieces)
    count = Counter(piece for sequence in pieces for piece in sequence if len(piece) > 3 and piece not in NAMES)
    saved = {piece: n * len(piece) for piece, n in count.items() if n >= 5}
    return sorted(saved, key=lambda piece: (-saved[piece], piece))[:limit]


def build_tokenizer(
    questions: list[str], answers: list[str], phrases: list[str], style: TokenizerStyle
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on questions and answers; `phrases` get tokens beside those found in the questions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    found = find_phrases(questions, style)
    whole = list(dict.fromkeys([*found, *NAMES, *phrases]))
    # Merges serve what lies between the phrases, and answers.
    between = re.compile("|".join(re.escape(text) for text in sorted(whole, key=len, reverse=True)))
    texts = [rest for question in questions for rest in between.split(question) if rest] + answers
    specials = [style.pad, style.eos, style.question, style.answer]
    trainer = trainers.BpeTrainer(
        vocab_size=len(specials) + 256 + style.merges,
        special_tokens=list(dict.fromkeys(specials)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in whole])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=style.eos,
        pad_token=style.pad,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
        chat_template=_chat_template(style),
    )


def _chat_template(style: TokenizerStyle) -> str:
    return (
        "{% for message in messages %}"
        "{% if message['role'] == 'user' %}" + style.question + "{{ message['content'] }}"
        "{% elif message['role'] == 'assistant' %}" + style.answer + "{{ message['content'] }}" + style.eos + ""
        "{% else %}{{ raise_exception('This model knows the roles user and assistant only.') }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}" + style.answer + "{% endif %}"
    )
