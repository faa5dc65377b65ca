"""Attackers of the work: signed batches whose groups are false, costly or full of code, and floods of valid ones.

What could be accepted is written down before it is sent (`book.jsonl`): its coordinates and a digest of its texts, and
whether it may be accepted at all. The bench holds against it what it finds in the pools of the honest nodes.
"""

import asyncio
import hashlib
import importlib
import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hostile_bench.member import Member
from sapo_node.rollouts import codec
from sapo_node.rollouts.pool import coordinates
from sapo_node.rollouts.schema import Batch, Completion, Group, ModelCard, TaskRef
from sapo_node.swarm import protocol
from sapo_node.tasks import catalog
from sapo_node.tasks.base import TaskRefused, config_hash, is_eval_question, question_sha256

if TYPE_CHECKING:
    from hostile_bench.attacker import Job, Operation

KEPT: Final = 8  # completions of a group that a node of the bench keeps, the first ones
LARGE_TEXT: Final = 60 * 1024
TRIES: Final = 100  # one question in ten belongs to evaluation, and some seeds have none
REPEATED: Final = 32  # groups kept to be sent again

# Settings near the bounds of `catalog.py`: what a group may cost at most.
BOUNDS: Final[list[tuple[str, dict[str, Any]]]] = [
    ("binary_matrix", {"min_n": 24, "max_n": 24, "p_zero": 0.01}),
    ("rotate_matrix", {"min_n": 24, "max_n": 24}),
    ("propositional_logic", {"min_vars": 6, "max_vars": 6, "min_statements": 6, "max_statements": 6}),
    ("countdown", {"min_numbers": 6, "max_numbers": 6}),
    ("basic_arithmetic", {"min_terms": 8, "max_terms": 8, "allow_parentheses": False}),
    ("word_sorting", {"min_words": 30, "max_words": 30}),
    ("caesar_cipher", {"max_words": 60}),
]
BEYOND: Final[list[tuple[str, dict[str, Any]]]] = [
    ("binary_matrix", {"min_n": 3000, "max_n": 3000}),
    ("arc_1d", {"min_size": 1_000_000, "max_size": 1_000_000}),
    ("base_conversion", {"min_base": 9, "max_base": 9}),
    ("gcd", {"min_value": 1, "max_value": 10**15}),
]


def texts_digest(texts: Sequence[str]) -> str:
    """Of the texts that a node keeps of a group, in hex."""
    return hashlib.sha256(msgspec.msgpack.encode(list(texts[:KEPT]))).hexdigest()


def load(job: "Job") -> None:
    """Import what an attacker of this kind needs, also where it is not used: memory is compared."""
    if job.kind in KINDS:
        importlib.import_module("sapo_node.tasks.reasoning_gym")


def planted(marker: str) -> list[str]:
    """Answers that make the marker's file where they are executed."""
    python = f"__import__('os').system('touch {marker}')"
    opened = f"open({marker!r},'w').close()"
    return [
        python,
        f"<answer>{python}</answer>",
        f"[{opened} for _ in [1]]",
        f"<answer>[[{python}]]</answer>",
        f"(lambda: {opened})()",
        f"$(touch {marker})",
        f"<answer>`touch {marker}`</answer>",
        f"{{{{''.__class__.__mro__[1].__subclasses__()}}}}{opened}",
    ]


@dataclass(frozen=True)
class Made:
    """A group, and whether a node may accept it."""

    group: Group
    acceptable: bool


class Workshop:
    """Makes groups by the attacker's own coordinates, and signs batches."""

    def __init__(self, job: "Job", member: Member) -> None:
        load(job)
        from sapo_node.tasks import reasoning_gym

        self._gym = reasoning_gym
        self.member = member
        self.identity = member.identity
        self.tasks = job.tasks
        self.marker = job.marker
        self._book = Path(job.folder, "book.jsonl").open("a", encoding="utf-8")  # noqa: SIM115  as long as the process
        self._indices = itertools.count()
        self._seq = itertools.count(int(time.time() * 1000))

    def item(self, name: str, config: dict[str, Any]) -> tuple[TaskRef, dict[str, Any]]:
        """The next question that may be trained on, with its truth. Raises TaskRefused where there is none."""
        for index in itertools.islice(self._indices, TRIES):
            task = TaskRef(
                source="reasoning_gym",
                version=catalog.library_version(),
                name=name,
                config_hash=config_hash(config),
                config=config,
                epoch=protocol.epoch_of(time.time()),
                index=index % protocol.MAX_INDEX,
            )
            seed = protocol.question_seed(
                self.member.swarm, self.identity.public_key, task.epoch, name, task.config_hash, task.index
            )
            try:
                made = self._gym.entry(self._gym.open_dataset(name, config, seed), name, seed)
            except TaskRefused:
                continue
            if not is_eval_question(question_sha256(made["question"])):
                return task, made
        raise TaskRefused(f"{name} has no question with {config}")

    def group(self, task: TaskRef, question: str, texts: Sequence[str]) -> Group:
        """A group as a node makes it."""
        return Group(
            task=task,
            question_sha256=question_sha256(question),
            completions=[Completion(text=text, finish="stop", n_tokens=8) for text in texts],
            sampled_at=time.time(),
            policy_version=1,
        )

    def valid(self, entry: tuple[str, dict[str, Any]] | None = None) -> Made:
        """A true group with an advantage."""
        task, made = self.item(*(entry or random.choice(self.tasks)))
        texts = [made["answer"], made["answer"], *(f"{random.randrange(10**6)}" for _ in range(KEPT - 2))]
        random.shuffle(texts)
        return Made(self.group(task, made["question"], texts), True)

    def envelope(self, made: Sequence[Made]) -> bytes:
        """A signed batch, its groups written down before. Raises Rejected beyond the limits of the wire."""
        for one in made:
            line = {
                "coordinates": coordinates(self.identity.peer_id, one.group.task).hex(),
                "texts": texts_digest([completion.text for completion in one.group.completions]),
                "acceptable": one.acceptable,
            }
            self._book.write(json.dumps(line) + "\n")
        self._book.flush()
        batch = Batch(
            proto=protocol.PROTO,
            swarm=self.member.swarm,
            peer_id=self.identity.peer_id,
            seq=next(self._seq),
            created_at=time.time(),
            model=ModelCard(name="demo", params=500_000, licence="apache-2.0", tokenizer_sha256=bytes(32)),
            groups=[one.group for one in made],
        )
        return codec.encode_batch(batch, self.identity).data


Trick = Callable[[Workshop], list[Made]]


def wrong_questions(shop: Workshop) -> list[Made]:
    """Right coordinates, the question and answers of others; stale and coming ones."""
    made = []
    for _ in range(8):
        (task, item), other = shop.item(*random.choice(shop.tasks)), shop.valid().group
        while other.question_sha256 == question_sha256(item["question"]):  # small tasks ask the same now and then
            other = shop.valid().group
        made.append(Made(msgspec.structs.replace(other, task=task), False))
        old = msgspec.structs.replace(other.task, epoch=other.task.epoch - random.choice((50, -50)))
        made.append(Made(msgspec.structs.replace(other, task=old), False))
    return made


def easier_settings(shop: Workshop) -> list[Made]:
    """Settings that are not those of the hash, or beyond the bounds: what no honest node sends."""
    made = [shop.valid() for _ in range(8)]
    name, config = random.choice(BEYOND)
    task = made[0].group.task
    if random.random() < 0.5:
        bad = msgspec.structs.replace(task, config={**task.config, "max_value": 2})
    else:
        bad = msgspec.structs.replace(task, name=name, config=config, config_hash=config_hash(config))
    made[0] = Made(msgspec.structs.replace(made[0].group, task=bad), False)
    return [Made(one.group, False) for one in made]  # beside a rejected one nothing is accepted


def planted_code(shop: Workshop) -> list[Made]:
    """True questions, one right answer, and answers that are programs."""
    made = []
    for _ in range(16):
        task, item = shop.item(*random.choice(shop.tasks))
        texts = [item["answer"], *random.sample(planted(shop.marker), KEPT - 1)]
        made.append(Made(shop.group(task, item["question"], texts), True))
    return made


def costly(shop: Workshop) -> list[Made]:
    """True questions near the bounds, and completions as large as the wire takes."""
    made = [shop.valid(random.choice(BOUNDS)) for _ in range(4)]
    for _ in range(8):
        task, item = shop.item(*random.choice(shop.tasks))
        junk = random.choice(("1 ", "(", "P ∧ ", "1/", "9", "<answer>")) * LARGE_TEXT
        texts = [item["answer"], *([junk.encode()[:LARGE_TEXT].decode(errors="ignore")] * (KEPT - 1))]
        made.append(Made(shop.group(task, item["question"], texts), True))
    return made


def duplicates(shop: Workshop) -> Trick:
    """The same groups again, in new batches."""
    sent = [shop.valid() for _ in range(REPEATED)]
    begun = time.time()

    def trick(shop: Workshop) -> list[Made]:
        nonlocal sent, begun
        if time.time() - begun > protocol.MAX_AGE_SECONDS / 2:
            sent, begun = [shop.valid() for _ in range(REPEATED)], time.time()
        return random.sample(sent, 16)

    return trick


async def work(job: "Job", member: Member, tasks: asyncio.TaskGroup) -> "Operation":
    """False, costly and poisoned batches. Attackers share the tricks out, since a reject makes the next ones vain."""
    shop = Workshop(job, member)
    tricks: list[list[Trick]] = [
        [wrong_questions, duplicates(shop)],
        [planted_code, planted_code, duplicates(shop)],
        [costly],
        [easier_settings, planted_code, wrong_questions],
    ]
    chosen = tricks[job.number % len(tricks)]

    async def one() -> None:
        made = random.choice(chosen)(shop)
        data = shop.envelope(made)
        if job.number % len(tricks) == 3 and random.random() < 0.3:  # also forged, under another's or no signature
            data = data[:70] + bytes(64) + data[134:]
        member.shelve(data, len(made))
        await member.announce(member.newest())

    return one


async def valid(job: "Job", member: Member, tasks: asyncio.TaskGroup) -> "Operation":
    """True groups with an advantage, in batches as large as there are, as fast as they can be made."""
    shop = Workshop(job, member)

    async def one() -> None:
        member.shelve(shop.envelope([shop.valid() for _ in range(protocol.MAX_GROUPS)]), protocol.MAX_GROUPS)
        await member.announce(member.newest())

    return one


KINDS: Final = {"work": work, "valid": valid}
