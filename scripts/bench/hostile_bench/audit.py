"""What honest nodes took from others, judged again: who made it, and are question and rewards true?

Pools forget (groups expire), so they are read all along a run, by a connection that only reads; `collect` keeps each
external group with its last known number of uses, and the digests of the nodes' own groups.
"""

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import base58
import msgspec

from hostile_bench.work_kinds import texts_digest
from sapo_node.rollouts.pool import coordinates
from sapo_node.rollouts.schema import TaskRef
from sapo_node.rollouts.stored import unpack_completions
from sapo_node.swarm import protocol
from sapo_node.tasks.base import TaskRefused, TaskSpec
from sapo_node.tasks.scoring import ScorerPool

ANSWER_SECONDS: Final = 2.0

_COLUMNS: Final = (
    "id, origin, producer, source, version, name, config_hash, config, epoch, task_index, question, rewards"
    ", completions"
)


@dataclass
class Kept:
    """A group as a node's pool held it."""

    producer: str
    task: TaskRef
    question: str
    rewards: list[float]
    texts: list[str]
    uses: int = 0

    @property
    def key(self) -> str:
        """Its coordinates, as pools know it."""
        return coordinates(self.producer, self.task).hex()


@dataclass
class PoolReader:
    """Follows one node's pool."""

    path: Path
    external: dict[int, Kept] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)  # coordinates -> digest of the texts
    _newest: int = 0

    def collect(self) -> None:
        """Read what is new. Raises sqlite3.Error."""
        if not self.path.exists():
            return
        db = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0, isolation_level=None)
        try:
            db.execute("BEGIN")  # one view for all that is read: else a group is used that was not there before
            if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'groups'").fetchone() is None:
                return  # the node is just making it
            for row in db.execute(f"SELECT {_COLUMNS} FROM groups WHERE id > ? ORDER BY id", (self._newest,)):
                self._take(*row)
            for group_id, uses in db.execute("SELECT id, uses FROM groups WHERE origin = 'external' AND uses > 0"):
                self.external[group_id].uses = uses
        finally:
            db.close()

    def _take(self, group_id: int, origin: str, producer: str, *rest: Any) -> None:
        source, version, name, digest, config, epoch, index, question, rewards, blob = rest
        task = TaskRef(
            source=source,
            version=version,
            name=name,
            config_hash=digest,
            config=msgspec.json.decode(config),
            epoch=epoch,
            index=index,
        )
        texts = [completion.text for completion in unpack_completions(blob)]
        kept = Kept(producer, task, question, msgspec.json.decode(rewards, type=list[float]), texts)
        self._newest = group_id
        if origin == "external":
            self.external[group_id] = kept
        else:
            self.own[kept.key] = texts_digest(texts)


@dataclass(frozen=True)
class Origins:
    """Groups of others by who made them."""

    hostile: int
    forged: int
    unproven: int


def origins(groups: Iterable[Kept], own: Mapping[str, str], books: Mapping[str, Mapping[str, set[str]]]) -> Origins:
    """Compare groups with what their producers made.

    `own`: of all honest nodes, coordinates -> digest of the texts. `books`: by an attacker's peer id, coordinates ->
    digests of what it sent and a node may accept. A group by neither, or with other texts, is forged; one by an honest
    node whose own copy was not seen is unproven.
    """
    hostile = forged = unproven = 0
    for one in groups:
        book = books.get(one.producer)
        digest = texts_digest(one.texts)
        if book is not None:
            hostile += 1
            forged += digest not in book.get(one.key, set())
        elif one.key not in own:
            unproven += 1
        else:
            forged += own[one.key] != digest
    return Origins(hostile, forged, unproven)


def read_book(lines: Iterable[str]) -> dict[str, set[str]]:
    """An attacker's book: coordinates -> digests of acceptable texts. A torn last line is left out."""
    found: dict[str, set[str]] = {}
    for line in lines:
        if not line.endswith("\n"):
            break
        one = msgspec.json.decode(line)
        if one["acceptable"]:
            found.setdefault(one["coordinates"], set()).add(one["texts"])
    return found


async def wrong(groups: Iterable[Kept], swarm: str) -> list[Kept]:
    """Those with another question or other rewards than new scorers, in a sandbox, compute from the coordinates."""
    scorers = ScorerPool(1, ANSWER_SECONDS)
    await scorers.start()
    found = []
    try:
        for one in groups:
            spec = TaskSpec(
                source=one.task.source, name=one.task.name, version=one.task.version, config=one.task.config
            )
            key = base58.b58decode(one.producer)[-32:]
            seed = protocol.question_seed(
                swarm, key, one.task.epoch, one.task.name, one.task.config_hash, one.task.index
            )
            try:
                judged = await scorers.judge(spec, seed, one.texts)
            except TaskRefused:
                found.append(one)
                continue
            if (judged.question.text, judged.rewards) != (one.question, one.rewards):
                found.append(one)
    finally:
        await scorers.close()
    return found


def tokens(groups: Iterable[Kept], tokenizer: Path) -> int:
    """Tokens of all completions, as the policy's own tokenizer cuts them, without their ends."""
    from tokenizers import Tokenizer

    cut = Tokenizer.from_file(str(tokenizer))
    return sum(len(cut.encode(text).ids) for one in groups for text in one.texts)
