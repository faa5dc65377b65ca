"""The outbox: what leaves when, and in which batches."""

from sapo_node.rollouts.schema import Completion, Group, TaskRef
from sapo_node.swarm.outbox import MAX_BATCH_TEXT, MAX_WAITING, Outbox, pack
from sapo_node.swarm.protocol import MAX_GROUPS


def group(index: int, size: int = 3) -> Group:
    ref = TaskRef(
        source="reasoning_gym", version="1", name="gcd", config_hash=bytes(32), config={}, epoch=1, index=index
    )
    completions = [Completion(text="x" * size, finish="stop", n_tokens=size)]
    return Group(task=ref, question_sha256=bytes(32), completions=completions, sampled_at=1.0, policy_version=0)


def test_the_first_groups_leave_at_once_and_later_ones_together() -> None:
    outbox = Outbox(3.0)
    outbox.put([group(0)])
    assert outbox.take(100.0) == [[group(0)]]
    outbox.put([group(1)])
    outbox.put([group(2)])
    assert outbox.take(102.9) == []
    assert outbox.take(103.0) == [[group(1), group(2)]]
    assert outbox.take(110.0) == []


def test_what_waits_is_bounded_and_the_oldest_go() -> None:
    outbox = Outbox(3.0)
    outbox.put([group(i) for i in range(MAX_WAITING + 5)])
    left = [g.task.index for batch in outbox.take(0.0) for g in batch]
    assert left == list(range(5, MAX_WAITING + 5))
    assert outbox.dropped == 5


def test_batches_keep_to_the_number_of_groups() -> None:
    assert [len(batch) for batch in pack([group(i) for i in range(MAX_GROUPS + 1)])] == [MAX_GROUPS, 1]


def test_batches_keep_to_the_size_of_an_envelope() -> None:
    half = MAX_BATCH_TEXT // 2
    assert [len(batch) for batch in pack([group(i, half) for i in range(5)])] == [2, 2, 1]
    assert [len(batch) for batch in pack([group(0), group(1, 2 * MAX_BATCH_TEXT), group(2)])] == [1, 1, 1]
