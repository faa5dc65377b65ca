"""Peers that want others to learn something bad, with groups that no verification can refuse.

Their questions follow from their key and the clock like anybody's, their right answers are right. What they choose is
which of their questions they answer and how: a sender needs no model, it can compute the truth as a receiver does.
"""

import contextlib
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sapo_node.config import NodeConfig
from sapo_node.identity import Identity
from sapo_node.rollouts.codec import Opened
from sapo_node.rollouts.schema import Completion, Group, TaskRef
from sapo_node.swarm.protocol import MAX_GROUPS, epoch_of, question_seed
from sapo_node.tasks import mixture
from sapo_node.tasks import reasoning_gym as gym
from sapo_node.tasks.base import TaskRefused, TaskSpec, is_eval_question, question_sha256

from .batches import signed

Kind = Literal["constant", "style", "long", "negative", "easy", "spelling", "far", "rare", "single"]
"""constant: only questions to which a task's most frequent answer is right, against other answers. style: right answers
in an odd form that the scorer takes, against wrong ones in the usual form. long: likewise, with as many blanks before
the answer as can be written at all, so that one more cuts it. negative: one wrong answer among right ones, so that most
of the gradient pushes away from a text that looks as it should. easy: one task only. spelling: as style, for receivers
that want the bare answer: the answer itself is spelt in an odd way, where the task's scorer takes any. far: one task
only, the one with the longest answers. rare: only questions whose answer is seldom right elsewhere, one right answer
among wrong ones, so that its advantage is the largest. single: only questions, of whatever task, to which one and the
same text is right."""

LOOKED_AT = 600  # questions a round among which it chooses
RARE = 100  # a truth of at most one question in so many is rare
KNOWN = 300  # truths of a task that are counted to find its most frequent one
ODD: dict[Kind, tuple[Callable[[str], str], ...]] = {
    "style": (
        lambda truth: f"<answer>{truth}</answer>",
        lambda truth: f"\n\n{truth}\n\n",
        lambda truth: f"  {truth}",
    ),
    "spelling": (
        lambda truth: f"0{truth}",
        lambda truth: f"+{truth}",
        lambda truth: truth.replace("/", " / "),
        str.upper,
        str.lower,
    ),
}


class _Question(NamedTuple):
    spec: TaskSpec
    index: int
    seed: int
    sha256: bytes
    truth: str


class Poisoner:
    """One hostile peer. It listens to nobody."""

    def __init__(self, index: int, seed: int, config: NodeConfig, clock: Callable[[], float], kind: Kind) -> None:
        key = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"poison/{seed}/{index}".encode()).digest())
        self.identity = Identity(Path("unused"), key)
        self._config, self._clock, self._kind = config, clock, kind
        self._seed = f"{seed}/{index}"
        self._entries = mixture.load(config.tasks).entries
        self._truths = {entry.spec.name: _truths(entry.spec) for entry in self._entries}
        self._commonest = Counter(truth for truths in self._truths.values() for truth in truths).most_common(1)[0][0]

    def draw(self, round: int) -> Opened:
        """A full batch, as others receive it."""
        rng = random.Random(f"poison/{self._seed}/{round}")
        epoch = epoch_of(self._clock())
        groups = []
        for asked in self._questions(epoch, rng):
            texts = self._texts(asked, rng)
            if texts and len(groups) < MAX_GROUPS:
                groups.append(self._group(asked, texts, epoch))
        return signed(self.identity, self._config.swarm.name, groups, round, self._clock())

    def _questions(self, epoch: int, rng: random.Random) -> list[_Question]:
        """Its questions of this epoch, in a random order."""
        entries = self._entries
        if self._kind == "easy":
            entries = entries[-1:]
        elif self._kind == "far":
            entries = [max(entries, key=lambda entry: len(max(self._truths[entry.spec.name], key=len)))]
        found = []
        for number in range(LOOKED_AT):
            spec, index = entries[number % len(entries)].spec, number // len(entries)
            seed = question_seed(
                self._config.swarm.name, self.identity.public_key, epoch, spec.name, spec.config_hash, index
            )
            try:
                made = gym.item(spec.name, spec.config, seed)
            except TaskRefused:
                continue
            digest = question_sha256(made["question"])
            if not is_eval_question(digest):
                found.append(_Question(spec, index, seed, digest, made["answer"]))
        rng.shuffle(found)
        return found

    def _texts(self, asked: _Question, rng: random.Random) -> list[str]:
        """L answers, of which some are right; none where the question does not serve."""
        count = self._config.rollouts.completions_per_task
        truths = self._truths[asked.spec.name]
        others = [truth for truth in truths if truth != asked.truth]
        if not others:
            return []
        wrong = [rng.choice(others) for _ in range(count)]
        right = self._right(asked) if self._serves(asked.truth, truths) else []
        if not right:
            return []
        number = {"negative": count - 1, "rare": 1}.get(self._kind, count // 2)
        return [right[i % len(right)] for i in range(number)] + wrong[: count - number]

    def _serves(self, truth: str, truths: Sequence[str]) -> bool:
        """Whether it answers questions with this truth; `truths` are those of other questions of the task."""
        if self._kind == "constant":
            return truth == Counter(truths).most_common(1)[0][0]
        if self._kind == "single":
            return truth == self._commonest
        return self._kind != "rare" or truths.count(truth) <= len(truths) // RARE

    def _right(self, asked: _Question) -> list[str]:
        """The right answers to a question as it writes them; none where the scorer takes no such form."""
        if self._kind == "long":  # a blank is a token, and the end is one
            return [asked.truth.rjust(self._config.inference.max_completion_tokens - 1)]
        if self._kind not in ODD:
            return [asked.truth]
        dataset = gym.open_dataset(asked.spec.name, asked.spec.config, asked.seed)
        made = gym.entry(dataset, asked.spec.name, asked.seed)
        texts = [form(asked.truth) for form in ODD[self._kind]]
        return [text for text in texts if text != asked.truth and gym.reward(dataset, asked.spec.name, made, text)]

    def _group(self, asked: _Question, texts: list[str], epoch: int) -> Group:
        spec = asked.spec
        return Group(
            task=TaskRef(
                source=spec.source,
                version=spec.version,
                name=spec.name,
                config_hash=spec.config_hash,
                config=spec.config,
                epoch=epoch,
                index=asked.index,
            ),
            question_sha256=asked.sha256,
            completions=[Completion(text=text, finish="stop", n_tokens=1 + len(text)) for text in texts],
            sampled_at=self._clock(),
            policy_version=0,
        )


def _truths(spec: TaskSpec) -> list[str]:
    """Right answers to other questions of a task."""
    found = []
    for seed in range(KNOWN):
        with contextlib.suppress(TaskRefused):
            found.append(str(gym.item(spec.name, spec.config, seed)["answer"]))
    return found
