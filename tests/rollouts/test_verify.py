"""Batches are made by a real sender (key, seeds, envelope) and judged by real scorers against a real pool."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sapo_node.config import NodeConfig, RolloutsSection, TaskEntry, TasksSection
from sapo_node.identity import Identity
from sapo_node.rollouts.arrivals import Arrivals
from sapo_node.rollouts.codec import Opened, encode_batch, open_batch
from sapo_node.rollouts.pool import Pool
from sapo_node.rollouts.schema import Batch, Completion, Group, ModelCard, TaskRef
from sapo_node.rollouts.verify import Reason, Verified, Verifier
from sapo_node.swarm import protocol
from sapo_node.swarm.exchange import Received
from sapo_node.swarm.peers import PeerBook
from sapo_node.tasks import catalog, mixture
from sapo_node.tasks.base import Judged, TaskSpec, config_hash, is_eval_question, question_sha256
from sapo_node.tasks.scoring import ScorerPool
from sapo_node.workers import WorkerDied

SWARM = "test"
EPOCH = 59_000_000
NOW = EPOCH * protocol.EPOCH_SECONDS + 40.0  # 10 s into the next epoch
CONFIG: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "operators": ["+"], "allow_parentheses": False}


class Node:
    """A verifier with what it stands on: scorers that live as long as the module, a pool of its own."""

    def __init__(self, runner: asyncio.Runner, scorers: ScorerPool, folder: Path) -> None:
        self.runner, self.scorers, self.folder = runner, scorers, folder
        self.me = Identity.create(folder / "me.key")
        self.sender = Identity.create(folder / "sender.key")
        self.pool = runner.run(Pool.open(folder / "pool.sqlite", RolloutsSection()))
        self.tasks = TasksSection(mixture=[TaskEntry(name="basic_arithmetic")])
        self.judged: list[TaskSpec] = []

    async def judge(self, spec: TaskSpec, seed: int, texts: list[str], *, strict: bool) -> Judged:
        self.judged.append(spec)
        return await self.scorers.judge(spec, seed, texts, strict=strict)

    async def judge_row(self, question: str, answer: str, verifier: Any, texts: list[str], *, strict: bool) -> Judged:
        return await self.scorers.judge_row(question, answer, verifier, texts, strict=strict)

    def verify(self, *groups: Group, now: float = NOW, sender: Identity | None = None, **options: Any) -> Verified:
        opened = envelope(sender or self.sender, *groups)
        settings: dict[str, Any] = {"judge": self, "known": self.pool, "accept": self.tasks.accept} | options
        verifier = Verifier(
            swarm=SWARM,
            public_key=self.me.public_key,
            mixture=mixture.load(self.tasks),
            max_age_seconds=300.0,
            **settings,
        )
        return self.runner.run(verifier.verify(opened, now))

    def seed(self, task: TaskRef) -> int:
        key = self.sender.public_key
        return protocol.question_seed(SWARM, key, task.epoch, task.name, task.config_hash, task.index)

    def group(self, skip: int = 0, evaluation: bool = False, **changes: Any) -> Group:
        """The sender's group of a sum, answered rightly, wrongly, and rightly without stopping."""
        for index in range(protocol.MAX_INDEX):
            task = task_ref(index=index, **changes)
            question = self.runner.run(self.scorers.question(spec_of(task), self.seed(task)))
            if is_eval_question(question.sha256) == evaluation:
                if skip == 0:
                    return self.answered(task, question.text)
                skip -= 1
        raise AssertionError("no such question")

    def answered(self, task: TaskRef, question: str) -> Group:
        left, right = question.removeprefix("Calculate ").rstrip(".").split(" + ")
        right_answer = str(int(left) + int(right))
        return group_of(task, question_sha256(question), right_answer, "not that", f"<answer>{right_answer}</answer>")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def scorers(runner: asyncio.Runner) -> Iterator[ScorerPool]:
    scorers = ScorerPool(1, 2.0)
    runner.run(scorers.start())
    yield scorers
    runner.run(scorers.close())


@pytest.fixture
def node(runner: asyncio.Runner, scorers: ScorerPool, tmp_path: Path) -> Iterator[Node]:
    node = Node(runner, scorers, tmp_path)
    yield node
    runner.run(node.pool.close())


def task_ref(index: int = 0, **changes: Any) -> TaskRef:
    fields: dict[str, Any] = {
        "source": "reasoning_gym",
        "version": catalog.library_version(),
        "name": "basic_arithmetic",
        "config": CONFIG,
        "epoch": EPOCH,
        "index": index,
    } | changes
    return TaskRef(config_hash=fields.pop("config_hash", config_hash(fields["config"])), **fields)


def spec_of(task: TaskRef) -> TaskSpec:
    return TaskSpec(source=task.source, name=task.name, version=task.version, config=task.config)


def group_of(task: TaskRef, sha256: bytes, *texts: str) -> Group:
    completions = [Completion(text=text, finish="stop", n_tokens=3) for text in texts]
    return Group(
        task=task, question_sha256=sha256, completions=completions, sampled_at=task.epoch * 30 + 5.0, policy_version=7
    )


def junk(**changes: Any) -> Group:
    """A group that is looked at no further than its coordinates."""
    return group_of(task_ref(**changes), b"\xff" * 32, "a", "b")


def envelope(sender: Identity, *groups: Group) -> Opened:
    batch = Batch(
        proto=protocol.PROTO,
        swarm=SWARM,
        peer_id=sender.peer_id,
        seq=1,
        created_at=NOW,
        model=ModelCard(name="m", params=1, licence="apache-2.0", tokenizer_sha256=bytes(32)),
        groups=list(groups),
    )
    return open_batch(encode_batch(batch, sender).data, SWARM)


def test_a_true_group_is_accepted_with_our_question_and_our_rewards(node: Node) -> None:
    verified = node.verify(node.group())
    assert verified.reasons == [Reason.ACCEPTED]
    [group] = verified.groups
    assert question_sha256(group.question) == group.question_sha256
    assert group.rewards == [1.0, 0.0, 1.0]
    assert [c.token_ids for c in group.completions] == [None] * 3
    assert not group.first_drawn
    assert (verified.outcome, verified.usable, verified.producer) == ("accept", 1, node.sender.peer_id)


def test_of_a_larger_group_than_our_own_only_the_first_completions_are_judged_and_kept(node: Node) -> None:
    verified = node.verify(node.group(), max_completions=2)
    [group] = verified.groups
    assert group.rewards == [1.0, 0.0]
    assert len(group.completions) == 2


def test_what_is_accepted_fits_into_the_pool_and_is_a_duplicate_from_then_on(node: Node) -> None:
    group = node.group()
    verified = node.verify(group)
    node.runner.run(node.pool.add_external(verified.producer, verified.content_id, verified.groups, NOW))
    judged = len(node.judged)
    again = node.verify(group, node.group(skip=1))
    assert again.reasons == [Reason.DUPLICATE, Reason.ACCEPTED]
    assert len(node.judged) == judged + 1, "a duplicate costs no scorer"


def test_a_group_without_advantage_is_accepted_but_not_usable(node: Node) -> None:
    group = node.group()
    same = msgspec.structs.replace(group, completions=[group.completions[1]] * 2)
    verified = node.verify(same)
    assert (verified.outcome, verified.usable) == ("accept", 0)


def test_seeds_of_another_key_ask_another_question(node: Node) -> None:
    other = Identity.create(node.folder / "other.key")
    assert node.verify(node.group(), sender=other).reasons == [Reason.OTHER_QUESTION]


def test_a_false_question_hash_is_ignored(node: Node) -> None:
    group = msgspec.structs.replace(node.group(), question_sha256=b"\xff" * 32)
    verified = node.verify(group)
    assert verified.reasons == [Reason.OTHER_QUESTION]
    assert verified.groups == []


def test_evaluation_questions_are_ignored(node: Node) -> None:
    assert node.verify(node.group(evaluation=True)).reasons == [Reason.EVALUATION]


def test_an_evaluation_question_under_a_false_hash_is_not_accepted(node: Node) -> None:
    hidden = msgspec.structs.replace(node.group(evaluation=True), question_sha256=b"\xff" * 32)
    assert node.verify(hidden).groups == []


def test_our_own_batch_is_ignored(node: Node) -> None:
    assert node.verify(junk(), sender=node.me).reasons == [Reason.OWN]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config_hash": bytes(32)}, Reason.WRONG_HASH),
        ({"config": {"max_digits": 99}}, Reason.OUT_OF_BOUNDS),
        ({"config": {"seed": 3}}, Reason.OUT_OF_BOUNDS),
        ({"config": {"size": [1, 2]}}, Reason.OUT_OF_BOUNDS),
        ({"name": "binary_matrix", "config": {"max_n": 3000}}, Reason.OUT_OF_BOUNDS),
        ({"name": "codeio", "config": {}}, Reason.UNKNOWN_TASK),
        ({"name": "never heard of"}, Reason.UNKNOWN_TASK),
        ({"version": "0.0.1"}, Reason.OTHER_VERSION),
        ({"version": "0.0.1", "config": {"new_setting": 1}}, Reason.OTHER_VERSION),
        ({"source": "dataset", "version": "00" * 32, "name": "mine", "config": {}}, Reason.UNKNOWN_TASK),
        ({"epoch": EPOCH - 20}, Reason.STALE),
        ({"epoch": EPOCH + 3}, Reason.SKEWED),
        ({"epoch": protocol.MAX_INTEGER}, Reason.SKEWED),
    ],
)
def test_bad_coordinates_never_reach_a_scorer(node: Node, changes: dict[str, Any], reason: Reason) -> None:
    assert node.verify(junk(**changes)).reasons == [reason]
    assert node.judged == []


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (Reason.ACCEPTED, "accept"),
        (Reason.STALE, "ignore"),
        (Reason.OTHER_QUESTION, "ignore"),
        (Reason.WRONG_HASH, "reject"),
        (Reason.OUT_OF_BOUNDS, "reject"),
        (Reason.COSTLY, "reject"),
    ],
)
def test_only_what_no_honest_node_sends_is_rejected(reason: Reason, outcome: str) -> None:
    assert reason.outcome == outcome


@pytest.mark.parametrize(("age", "reason"), [(299.0, Reason.ACCEPTED), (301.0, Reason.STALE)])
def test_age_counts_from_the_draw(node: Node, age: float, reason: Reason) -> None:
    group = node.group()
    assert node.verify(group, now=group.sampled_at + age).reasons == [reason]


def test_a_late_time_of_sampling_makes_no_group_younger(node: Node) -> None:
    group = msgspec.structs.replace(node.group(), sampled_at=NOW + 10_000)
    assert node.verify(group, now=(EPOCH + 1) * 30 + 301.0).reasons == [Reason.STALE]


def test_one_epoch_of_skew_is_forgiven(node: Node) -> None:
    group = node.group(epoch=EPOCH + 2)
    assert node.verify(group).reasons == [Reason.ACCEPTED]


def test_one_reject_keeps_the_whole_batch_from_the_scorers(node: Node) -> None:
    verified = node.verify(node.group(), junk(config={"max_digits": 99}))
    assert verified.reasons == [Reason.BESIDE_REJECTED, Reason.OUT_OF_BOUNDS]
    assert (verified.outcome, verified.groups, node.judged) == ("reject", [], [])


def test_groups_of_a_task_with_an_alarm_are_ignored_unjudged(node: Node) -> None:
    assert node.verify(node.group(), barred=lambda task, *_: task == "basic_arithmetic").reasons == [Reason.ALARM]
    assert node.judged == []
    assert node.verify(node.group(), barred=lambda task, *_: task == "gcd").reasons == [Reason.ACCEPTED]


def test_only_the_mixture_if_the_owner_says_so(node: Node) -> None:
    node.tasks = TasksSection(mixture=[TaskEntry(name="gcd")])
    assert node.verify(node.group()).reasons == [Reason.ACCEPTED]
    assert node.verify(node.group(), accept="mixture").reasons == [Reason.UNKNOWN_TASK]


def test_what_is_not_judged_within_the_deadline_is_out_of_time(node: Node) -> None:
    async def slow(spec: TaskSpec, seed: int, texts: list[str], *, strict: bool) -> Judged:
        judged = await node.scorers.judge(spec, seed, texts, strict=strict)
        if len(node.judged) == 1:
            await asyncio.sleep(60)
        node.judged.append(spec)
        return judged

    node.judge = slow  # type: ignore[method-assign]
    verified = node.verify(*(node.group(skip=i) for i in range(3)), batch_seconds=1.0)
    assert verified.reasons == [Reason.ACCEPTED, Reason.LATE, Reason.LATE]
    assert len(verified.groups) == 1


def test_the_group_at_hand_is_judged_to_its_end_when_a_batch_is_out_of_time(node: Node) -> None:
    """Hope: my slow groups meet the batch's deadline, which costs a scorer each time, and me nothing."""
    broken_off = []

    async def slow(spec: TaskSpec, seed: int, texts: list[str], *, strict: bool) -> Judged:
        try:
            await asyncio.sleep(0.6)
        except asyncio.CancelledError:
            broken_off.append(seed)
            raise
        return await node.scorers.judge(spec, seed, texts, strict=strict)

    node.judge = slow  # type: ignore[method-assign]
    verified = node.verify(*(node.group(skip=i) for i in range(3)), batch_seconds=0.6)
    assert broken_off == []
    assert verified.reasons[0] is Reason.ACCEPTED
    assert verified.reasons[-1] is Reason.LATE


def test_a_batch_of_all_tasks_stops_nothing(node: Node) -> None:
    """Hope: a node hashes 10,000 seeds for the first group of each task, and answers nobody meanwhile."""
    groups = [junk(name=name, config={}) for name in catalog.OFFERED][: protocol.MAX_GROUPS]
    opened = envelope(node.sender, *groups)
    verifier = Verifier(
        swarm=SWARM,
        public_key=node.me.public_key,
        mixture=mixture.load(node.tasks),
        max_age_seconds=300.0,
        judge=node,
        known=node.pool,
        accept="offered",
        barred=lambda task, settings, producer: True,
    )
    threads = set()

    def made(specs: Any) -> set[int]:
        threads.add(threading.current_thread())
        return set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sapo_node.rollouts.verify.EvalSeeds", made)
        verified = node.runner.run(verifier.verify(opened, NOW))
    assert set(verified.reasons) == {Reason.ALARM}
    assert len(verifier._eval_seeds) == len(groups)
    assert threading.main_thread() not in threads


def test_a_dead_scorer_is_not_the_senders_fault(node: Node) -> None:
    async def dead(spec: TaskSpec, seed: int, texts: list[str], *, strict: bool) -> Judged:
        raise WorkerDied("gone")

    node.judge = dead  # type: ignore[method-assign]
    verified = node.verify(node.group(), node.group(skip=1))
    assert (verified.reasons, verified.outcome) == ([Reason.UNSCORED] * 2, "ignore")


HANGS = "all(True for _ in iter(int, 1))"


@pytest.fixture
def unguarded(node: Node) -> Iterator[Node]:
    """A node whose scorers evaluate answers, so that some of them can hang."""
    node.scorers = ScorerPool(1, 2.0, module="tests.tasks.unguarded_worker")
    node.runner.run(node.scorers.start())
    yield node
    node.runner.run(node.scorers.close())


def hanging(index: int, epoch: int = EPOCH) -> Group:
    """A group whose answers hang a scorer."""
    task = task_ref(name="binary_matrix", config={"max_n": 3}, index=index, epoch=epoch)
    return group_of(task, b"\xff" * 32, *[HANGS] * 8)


@pytest.mark.slow
def test_a_batch_ends_at_the_first_group_that_costs_a_scorer(unguarded: Node) -> None:
    groups = [hanging(index) for index in range(3)]
    verified = unguarded.verify(unguarded.group(), *groups, junk(epoch=EPOCH - 20))
    beside = Reason.BESIDE_REJECTED
    assert verified.reasons == [beside, Reason.COSTLY, beside, beside, Reason.STALE]
    assert (verified.outcome, verified.groups) == ("reject", [])
    assert unguarded.scorers.faults == 1


@pytest.mark.slow
def test_who_sends_costly_groups_is_shunned_and_what_still_comes_is_not_judged(unguarded: Node) -> None:
    now = time.time()
    book = PeerBook()
    arrivals = Arrivals(
        NodeConfig(),
        unguarded.me,
        mixture.load(unguarded.tasks),
        unguarded.scorers,
        unguarded.pool,
        book,
    )
    arrivals._verifier._swarm = SWARM
    for index in range(8):
        opened = envelope(unguarded.sender, hanging(index, protocol.epoch_of(now)))
        received = Received(opened=opened, size=1000, peer_id=unguarded.sender.peer_id, via="dht", seconds=0.0)
        unguarded.runner.run(arrivals.take(received))
    assert not book.welcome(unguarded.sender.peer_id, now)
    assert unguarded.scorers.faults == arrivals.reasons[Reason.COSTLY] == 4


def dataset_group(node: Node, rows: int = 40, keep: bool = True) -> tuple[Group, int]:
    """A data set in this node's mixture and the sender's group on the row that its seed addresses."""
    path = node.folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"Double {i}?", "answer": str(2 * i)}) + "\n" for i in range(rows)))
    entry = TaskEntry(source="dataset", name="doubles", path=path, verifier="numeric")
    node.tasks = TasksSection(mixture=[TaskEntry(name="gcd"), entry])
    [mine] = [e.rows for e in mixture.load(node.tasks).entries if e.rows]
    if not keep:
        node.tasks = TasksSection(mixture=[TaskEntry(name="gcd")])
    task = task_ref(source="dataset", name="doubles", version=mine.version, config={})
    row = mine.row(node.seed(task))
    return group_of(task, question_sha256(row.question), row.answer, "-1"), int(row.answer)


def test_rows_of_a_data_set_that_this_node_has_are_judged_by_its_own_rows(node: Node) -> None:
    group, answer = dataset_group(node)
    verified = node.verify(group)
    assert verified.reasons == [Reason.ACCEPTED]
    assert verified.groups[0].question == f"Double {answer // 2}?"
    assert verified.groups[0].rewards == [1.0, 0.0]


def test_rows_of_others_data_sets_are_ignored(node: Node) -> None:
    group, _ = dataset_group(node, keep=False)
    assert node.verify(group).reasons == [Reason.UNKNOWN_TASK]


def test_another_file_under_the_same_name_is_another_version(node: Node) -> None:
    group, _ = dataset_group(node)
    dataset_group(node, rows=41)
    assert node.verify(group).reasons == [Reason.OTHER_VERSION]


def test_a_data_set_has_no_settings(node: Node) -> None:
    group, _ = dataset_group(node)
    task = task_ref(source="dataset", name="doubles", version=group.task.version, config={"rows": 1})
    assert node.verify(msgspec.structs.replace(group, task=task)).reasons == [Reason.OUT_OF_BOUNDS]
