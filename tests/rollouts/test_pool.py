"""The pool on real files; what a crash leaves behind is tried with a real process and a real kill -9."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sapo_node.config import RolloutsSection
from sapo_node.rollouts import pool_file
from sapo_node.rollouts.pool import MAX_CANDIDATES, NewGroup, Pool, PoolError, coordinates, drawn_at
from sapo_node.rollouts.schema import Group, TaskRef
from sapo_node.swarm import protocol
from sapo_node.swarm.protocol import MAX_INDEX
from sapo_node.tasks.base import TaskSpec, config_hash
from sapo_node.training.base import TrainCompletion

EPOCH = 59_000_000
NOW = EPOCH * 30 + 20.0
SPEC = TaskSpec(source="reasoning_gym", name="gcd", version="1", config={"max_value": 9})
Use = Callable[[Pool], Awaitable[None]]


def new_group(index: int = 0, **changes: Any) -> NewGroup:
    epoch = changes.pop("epoch", EPOCH)
    task = TaskRef(
        source="reasoning_gym",
        version="1",
        name=changes.pop("name", "gcd"),
        config_hash=config_hash(SPEC.config),
        config=SPEC.config,
        epoch=epoch,
        index=index,
    )
    fields: dict[str, Any] = {
        "question": f"What is {index}?",
        "question_sha256": index.to_bytes(32, "big"),
        "completions": [TrainCompletion(text="1", finish="stop"), TrainCompletion(text="ä\n2", finish="length")],
        "rewards": [1.0, 0.0],
        "sampled_at": epoch * 30 + 1.0,
        "policy_version": 0,
    }
    return NewGroup(task=task, **(fields | changes))


def wire(*groups: NewGroup) -> list[Group]:
    """Groups as they arrive."""
    return [
        Group(task=g.task, question_sha256=g.question_sha256, completions=[], sampled_at=NOW, policy_version=0)
        for g in groups
    ]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool.sqlite"


def with_pool(path: Path, use: Use, **limits: Any) -> None:
    async def run() -> None:
        pool = await Pool.open(path, RolloutsSection(**limits))
        try:
            await use(pool)
        finally:
            await pool.close()

    asyncio.run(run())


def test_a_local_group_comes_back_as_it_was(path: Path) -> None:
    completions = [
        TrainCompletion(text="yes", finish="stop", token_ids=[0, 70_000, 3], logprobs=[-0.5, -1.25, 0.0]),
        TrainCompletion(text="", finish="length", token_ids=[], logprobs=[]),
    ]

    async def use(pool: Pool) -> None:
        [group_id] = await pool.add_local("me", [new_group(completions=completions, policy_version=4)], NOW)
        [group] = await pool.consume([group_id], 1)
        assert group.completions == completions
        assert (group.group_id, group.origin, group.producer) == (group_id, "local", "me")
        assert (group.question, group.rewards, group.policy_version) == ("What is 0?", [1.0, 0.0], 4)

    with_pool(path, use)


def test_log_probs_keep_float32_precision(path: Path) -> None:
    completions = [TrainCompletion(text="x", finish="stop", token_ids=[1], logprobs=[-3.1415926535])] * 2

    async def use(pool: Pool) -> None:
        ids = await pool.add_local("me", [new_group(completions=completions)], NOW)
        [group] = await pool.consume(ids, 1)
        assert group.completions[0].logprobs == pytest.approx([-3.1415926535], rel=1e-7)

    with_pool(path, use)


def test_external_completions_are_text_only(path: Path) -> None:
    async def use(pool: Pool) -> None:
        ids = await pool.add_external("peer", bytes(32), [new_group()], NOW)
        [group] = await pool.consume(ids, 1)
        assert group.completions == new_group().completions
        assert (group.origin, group.producer) == ("external", "peer")

    with_pool(path, use)


def test_rewards_must_fit_the_completions(path: Path) -> None:
    async def use(pool: Pool) -> None:
        with pytest.raises(ValueError, match="3 rewards for 2 completions"):
            await pool.add_local("me", [new_group(), new_group(1, rewards=[1.0, 0.0, 0.0])], NOW)
        assert (await pool.stats()).local == 0, "one transaction"

    with_pool(path, use)


# Candidates


RIGHT, HALF = [1.0, 1.0], [1.0, 0.0]


async def keep_recent(pool: Pool, rewards: list[list[float]]) -> None:
    """Two groups of gcd, the first of which is used, one of bf, and one of bf that is too old; with these rewards."""
    first, second, other, old = rewards
    [used, *_] = await pool.add_local(
        "me",
        [
            new_group(0, rewards=first),
            new_group(1, rewards=second),
            new_group(2, rewards=other, name="bf"),
            new_group(3, rewards=old, name="bf", epoch=EPOCH - 20),
        ],
        NOW,
    )
    await pool.consume([used], 1)


def test_yields_count_recent_groups_of_all_by_task_and_settings(path: Path) -> None:
    async def use(pool: Pool) -> None:
        await keep_recent(pool, [HALF, RIGHT, HALF, HALF])
        await pool.add_external("peer", bytes(32), [new_group(4, rewards=HALF), new_group(5, rewards=RIGHT)], NOW)
        found = await pool.yields(NOW)
        assert {name: counted for (name, _), counted in found.items()} == {"gcd": (2, 4), "bf": (1, 1)}
        assert set(found) == {(g.task.name, g.task.config_hash) for g in (new_group(0), new_group(2, name="bf"))}

    with_pool(path, use)


def test_one_peer_cannot_outweigh_what_this_node_sees_itself(path: Path) -> None:
    """Hope: groups of mine without signal make a node stop asking its best task (or with it, ask one it learns nothing
    from)."""

    async def use(pool: Pool) -> None:
        await pool.add_local("me", [new_group(i, rewards=HALF) for i in range(40)], NOW)
        for start in range(0, 1024, 64):
            flood = [new_group(start + i, rewards=RIGHT) for i in range(64)]
            await pool.add_external("evil", start.to_bytes(32, "big"), flood, NOW)
        [counted] = (await pool.yields(NOW)).values()
        assert counted == (40, 80)

    with_pool(path, use)


def test_own_rewards_are_means_by_task_over_recent_groups_used_or_not(path: Path) -> None:
    async def use(pool: Pool) -> None:
        await keep_recent(pool, [RIGHT, HALF, HALF, RIGHT])
        await pool.add_external("peer", bytes(32), [new_group(4, rewards=[0.0, 0.0])], NOW)
        assert await pool.own_rewards(NOW) == {"gcd": 0.75, "bf": 0.5}

    with_pool(path, use)


def test_a_crowd_of_producers_hides_nothing_of_what_this_node_saw_itself(path: Path) -> None:
    """Hope: own groups have one turn among all producers, so a thousand cheap keys (or honest peers) take all places, a
    node knows nothing of its own work, and what the crowd sends decides which tasks it asks."""

    async def use(pool: Pool) -> None:
        own = [new_group(i, rewards=HALF) for i in range(640)]
        await pool.add_local("me", own, NOW)
        for key in range(MAX_CANDIDATES + 76):
            await pool.add_external(f"key {key}", key.to_bytes(32, "big"), [new_group(rewards=RIGHT, name="bf")], NOW)
        assert await pool.own_rewards(NOW) == {"gcd": 0.5}
        assert (await pool.yields(NOW))["gcd", own[0].task.config_hash] == (640, 640)

    with_pool(path, use)


def test_local_candidates_are_unused_and_within_staleness(path: Path) -> None:
    async def use(pool: Pool) -> None:
        ids = await pool.add_local("me", [new_group(v, policy_version=v) for v in (1, 2, 3, 4)], NOW)
        await pool.consume([ids[1]], 1)
        found = await pool.local_candidates(NOW, policy_version=3, max_staleness=2)
        assert [c.group_id for c in found] == [ids[0], ids[2]]

    with_pool(path, use)


def test_external_candidates_are_young_and_have_uses_left(path: Path) -> None:
    async def use(pool: Pool) -> None:
        groups = [new_group(0), new_group(1), new_group(2, epoch=EPOCH - 20), new_group(3)]
        ids = await pool.add_external("peer", bytes(32), groups, NOW)
        await pool.consume([ids[0]], 1)
        found = {c.group_id: c for c in await pool.external_candidates(NOW)}
        assert set(found) == {ids[1], ids[3]}
        candidate = found[ids[1]]
        assert (candidate.producer, candidate.task, candidate.rewards) == ("peer", "gcd", (1.0, 0.0))
        assert (candidate.age_seconds, candidate.uses) == (19.0, 0)
        assert candidate.question_sha256 == (1).to_bytes(32, "big")

    with_pool(path, use)


def test_a_clock_that_was_set_back_keeps_no_groups_from_the_future(path: Path) -> None:
    hours = 10 * 3600 // protocol.EPOCH_SECONDS

    async def use(pool: Pool) -> None:
        soon = new_group(0, epoch=EPOCH + protocol.MAX_EPOCHS_AHEAD)
        later = new_group(1, epoch=EPOCH + hours)
        ids = await pool.add_external("peer", bytes(32), [soon, later], NOW)
        assert [c.group_id for c in await pool.external_candidates(NOW)] == ids[:1]
        assert sum(count for _, count in (await pool.yields(NOW)).values()) == 1
        assert await pool.expire_by_age(NOW) == 1
        assert [c.group_id for c in await pool.external_candidates(NOW)] == ids[:1]

    with_pool(path, use)


def test_first_drawn_survives(path: Path) -> None:
    async def use(pool: Pool) -> None:
        await pool.add_local("me", [new_group(0), new_group(1, first_drawn=False)], NOW)
        assert [c.first_drawn for c in await pool.local_candidates(NOW, 0, 0)] == [True, False]

    with_pool(path, use)


@pytest.mark.parametrize(("sampled_at", "drawn"), [(-5.0, 0.0), (12.5, 12.5), (1e12, 30.0)])
def test_the_epoch_bounds_what_a_sender_says_of_its_clock(sampled_at: float, drawn: float) -> None:
    start = EPOCH * 30
    assert drawn_at(new_group().task, start + sampled_at) == start + drawn


# Duplicates


def test_a_duplicate_is_left_out_and_counted(path: Path) -> None:
    async def use(pool: Pool) -> None:
        await pool.add_external("peer", b"a" * 32, [new_group(0), new_group(1)], NOW)
        ids = await pool.add_external("peer", b"b" * 32, [new_group(1), new_group(2)], NOW)
        assert len(ids) == 1
        stats = await pool.stats()
        assert (stats.external, stats.duplicates) == (3, 1)

    with_pool(path, use)


def test_the_same_coordinates_of_two_peers_are_two_groups() -> None:
    assert coordinates("a", new_group().task) != coordinates("b", new_group().task)


@pytest.mark.parametrize("changes", [{"epoch": EPOCH + 1}, {"index": 1}, {"name": "lcm"}])
def test_every_coordinate_counts(changes: dict[str, Any]) -> None:
    assert coordinates("a", new_group(**changes).task) != coordinates("a", new_group().task)


def test_a_used_and_expired_group_is_still_known(path: Path) -> None:
    async def use(pool: Pool) -> None:
        group = new_group()
        await pool.consume(await pool.add_external("peer", bytes(32), [group], NOW), 1)
        await pool.expire(NOW + 300, policy_version=0, max_staleness=0)
        assert (await pool.stats()).external == 0
        assert await pool.known("peer", wire(group, new_group(1))) == [True, False]
        assert await pool.add_external("peer", b"c" * 32, [group], NOW) == []

    with_pool(path, use)


def test_purge_forgets_a_peers_groups_but_not_their_coordinates(path: Path) -> None:
    async def use(pool: Pool) -> None:
        await pool.add_external("bad", b"a" * 32, [new_group()], NOW)
        await pool.add_external("good", b"b" * 32, [new_group()], NOW)
        assert await pool.purge("bad") == 1
        assert [c.producer for c in await pool.external_candidates(NOW)] == ["good"]
        assert await pool.add_external("bad", b"c" * 32, [new_group()], NOW) == []

    with_pool(path, use)


def test_purge_can_spare_what_came_later(path: Path) -> None:
    async def use(pool: Pool) -> None:
        await pool.add_external("bad", bytes(32), [new_group(0)], NOW)
        await pool.add_external("bad", bytes(31) + b"1", [new_group(1)], NOW + 2)
        assert await pool.purge("bad", NOW + 1) == 1
        assert (await pool.stats()).external == 1

    with_pool(path, use)


def test_batches_are_seen_once_they_were_handled_even_if_nothing_was_usable(path: Path) -> None:
    async def use(pool: Pool) -> None:
        await pool.add_external("peer", b"a" * 32, [], NOW)
        assert await pool.seen([b"a" * 32, b"b" * 32]) == {b"a" * 32}
        await pool.expire(NOW + 3600, 0, 0)
        assert await pool.seen([b"a" * 32]) == set()

    with_pool(path, use)


# Uses


def test_a_use_is_counted_once_a_round(path: Path) -> None:
    async def use(pool: Pool) -> None:
        ids = await pool.add_external("peer", bytes(32), [new_group()], NOW)
        first = await pool.consume(ids, 5)
        assert await pool.consume(ids, 5) == first != []
        assert (await pool.external_candidates(NOW))[0].uses == 1
        assert await pool.consume(ids, 6) != []
        assert await pool.consume(ids, 7) == []

    with_pool(path, use, max_external_uses=2)


def test_an_own_group_has_one_use(path: Path) -> None:
    async def use(pool: Pool) -> None:
        ids = await pool.add_local("me", [new_group()], NOW)
        assert await pool.consume(ids, 1) != []
        assert await pool.consume(ids, 2) == []

    with_pool(path, use, max_external_uses=3)


def test_a_replayed_round_of_a_later_run_does_not_get_a_group_again(path: Path) -> None:
    """A node killed after `consume` resumes from an older checkpoint and comes to the same round once more."""
    ids: list[int] = []

    async def before(pool: Pool) -> None:
        ids.extend(await pool.add_external("peer", bytes(32), [new_group(0), new_group(1)], NOW))
        assert len(await pool.consume([ids[0]], 5)) == 1

    async def after(pool: Pool) -> None:
        assert [c.group_id for c in await pool.external_candidates(NOW)] == [ids[1]]
        assert [g.group_id for g in await pool.consume(ids, 5)] == [ids[1]]

    with_pool(path, before)
    with_pool(path, after)


def test_consume_keeps_the_order_and_leaves_out_what_is_gone(path: Path) -> None:
    async def use(pool: Pool) -> None:
        ids = await pool.add_local("me", [new_group(i) for i in range(3)], NOW)
        await pool.discard([ids[1]])
        assert [g.group_id for g in await pool.consume([ids[2], 999, ids[1], ids[0]], 1)] == [ids[2], ids[0]]

    with_pool(path, use)


def test_ids_are_never_given_twice(path: Path) -> None:
    async def use(pool: Pool) -> None:
        ids = await pool.add_local("me", [new_group()], NOW)
        await pool.discard(ids)
        assert await pool.add_local("me", [new_group(1)], NOW) > ids

    with_pool(path, use)


# Limits


def test_expire_drops_own_groups_that_no_step_may_use(path: Path) -> None:
    """Also those from after the checkpoint from which the node resumed."""

    async def use(pool: Pool) -> None:
        await pool.add_local("me", [new_group(v, policy_version=v) for v in (7, 8, 9)], NOW)
        assert await pool.expire(NOW + 10_000, policy_version=8, max_staleness=0) == 2
        assert len(await pool.local_candidates(NOW, 8, 0)) == 1
        assert (await pool.stats()).expired == 2

    with_pool(path, use)


def test_a_flood_of_worthless_batches_leaves_room_for_groups(path: Path) -> None:
    """Hope: what is remembered of batches without one usable group grows until it takes all bytes of the pool, while
    the node waits for a round, and its own groups are thrown out as they come."""

    async def use(pool: Pool) -> None:
        await pool.add_local("me", [new_group(i) for i in range(8)], NOW)
        for batch in range(200):
            flood = [new_group(i, rewards=[0.0, 0.0]) for i in range(64)]
            await pool.add_external(f"evil {batch}", batch.to_bytes(32, "big"), flood, NOW)
        stats = await pool.stats()
        assert stats.local_unused == 8
        assert await pool._reader.ask(lambda db: db.execute("SELECT count(*) FROM seen").fetchone()[0]) == 1024

    with_pool(path, use, max_bytes=1 << 20, max_groups=64)


def test_what_is_too_old_goes_without_a_round(path: Path) -> None:
    async def use(pool: Pool) -> None:
        own = await pool.add_local("me", [new_group(i) for i in range(2)], NOW)
        await pool.consume(own[:1], 1)
        await pool.add_external("peer", bytes(32), [new_group()], NOW)
        assert await pool.expire_by_age(NOW + 270) == 0
        assert await pool.expire_by_age(NOW + 400) == 2
        stats = await pool.stats()
        assert (stats.local, stats.external, stats.expired) == (1, 0, 2), "an unused own group goes by its version"

    with_pool(path, use)


def test_the_oldest_of_who_holds_most_go_first_and_unused_own_groups_last(path: Path) -> None:
    async def use(pool: Pool) -> None:
        own = await pool.add_local("me", [new_group(i) for i in range(10)], NOW)
        await pool.consume(own[:2], 1)
        others = await pool.add_external("peer", bytes(32), [new_group(i) for i in range(60)], NOW)
        left = await pool.consume([*own, *others], 2)
        assert [g.group_id for g in left] == [*own[2:], *others[6:]]
        assert (await pool.stats()).evicted == 6

    with_pool(path, use, max_groups=64)


def test_long_groups_of_one_peer_displace_nobody_else(path: Path) -> None:
    """Hope: texts that are long, and cost nothing on the wire, push all honest groups out of the pool."""
    text = [TrainCompletion(text="x" * 65_536, finish="stop")] * 2

    async def use(pool: Pool) -> None:
        for peer in range(10):
            await pool.add_external(f"honest {peer}", bytes([peer]) * 32, [new_group(i) for i in range(20)], NOW)
        for start in range(0, 64, 16):
            flood = [new_group(start + i, completions=text) for i in range(16)]
            await pool.add_external("evil", bytes([100 + start]) * 32, flood, NOW)
        left = Counter(c.producer for c in await pool.external_candidates(NOW))
        assert [left[f"honest {peer}"] for peer in range(10)] == [20] * 10
        assert 0 < left["evil"] < 64

    with_pool(path, use, max_bytes=4 << 20)


def test_many_groups_of_one_peer_hide_nobody_else(path: Path) -> None:
    """Hope: the newest groups are looked at, so a thousand of mine leave no room for others."""

    async def use(pool: Pool) -> None:
        await pool.add_external("honest", b"h" * 32, [new_group(i) for i in range(20)], NOW)
        for start in range(0, 2 * MAX_CANDIDATES, 64):
            content_id = start.to_bytes(32, "big")
            await pool.add_external("evil", content_id, [new_group(start + i) for i in range(64)], NOW)
        found = Counter(c.producer for c in await pool.external_candidates(NOW))
        assert found == {"honest": 20, "evil": MAX_CANDIDATES - 20}

    with_pool(path, use)


def test_what_teaches_nothing_goes_before_all_else(path: Path) -> None:
    async def use(pool: Pool) -> None:
        for number in range(32):
            filler = new_group(number, rewards=[1.0, 1.0])
            await pool.add_external(f"key {number}", number.to_bytes(32, "big"), [filler], NOW)
        await pool.add_external("honest", b"h" * 32, [new_group(i) for i in range(64)], NOW)
        assert len(await pool.external_candidates(NOW)) == 64
        assert (await pool.stats()).external == 64

    with_pool(path, use, max_groups=64)


def test_one_question_under_many_coordinates_is_one_group(path: Path) -> None:
    """Hope: where a task has few questions, one of them under many coordinates is all of J, used or not."""
    same = [new_group(i, question_sha256=bytes(32)) for i in range(8)]

    async def use(pool: Pool) -> None:
        ids = await pool.add_external("peer", b"a" * 32, same[:4], NOW)
        assert len(ids) == 1
        await pool.consume(ids, 1)
        assert await pool.known("peer", wire(*same[4:])) == [True] * 4
        assert await pool.add_external("peer", b"b" * 32, same[4:], NOW) == [], "used is used"
        assert len(await pool.add_external("another", b"c" * 32, same[4:], NOW)) == 1
        assert (await pool.stats()).duplicates == 10

    with_pool(path, use)


def test_a_file_of_the_first_version_goes_on(path: Path) -> None:
    db = sqlite3.connect(path)
    for statement in pool_file._FIRST.split(";"):
        db.execute(statement)
    db.execute("PRAGMA user_version = 1")
    db.execute(f"PRAGMA application_id = {pool_file.APPLICATION_ID}")
    db.execute("INSERT INTO meta VALUES ('seq.batch', 7)")
    db.commit()
    db.close()

    async def use(pool: Pool) -> None:
        assert await pool.next_seq("batch") == 8
        await pool.add_external("peer", bytes(32), [new_group()], NOW)
        assert len(await pool.external_candidates(NOW)) == 1

    with_pool(path, use)
    with_pool(path, nothing)


def test_the_file_stays_within_its_bytes(path: Path) -> None:
    limit = 1 << 20
    text = TrainCompletion(text="x" * 20_000, finish="stop")

    async def use(pool: Pool) -> None:
        for start in range(0, 200, 20):
            groups = [new_group(i, completions=[text, text]) for i in range(start, start + 20)]
            ids = await pool.add_local("me", groups, NOW)
        stats = await pool.stats()
        assert stats.bytes <= limit
        assert stats.local >= 15, "no more than needed is thrown out"
        assert [g.group_id for g in await pool.consume(ids[-1:], 1)] == ids[-1:], "the newest stays"

    with_pool(path, use, max_bytes=limit)
    assert path.stat().st_size <= limit + 20 * 42_000, "the limit and what one call added"


# Counters


def test_sequence_numbers_rise_across_restarts_and_a_lost_file(path: Path) -> None:
    seen: list[int] = []

    async def use(pool: Pool) -> None:
        seen.extend([await pool.next_seq("batch") for _ in range(3)])
        assert await pool.next_seq("announcement") > 0

    with_pool(path, use)
    with_pool(path, use)
    path.unlink()
    with_pool(path, use)
    assert seen == sorted(set(seen))


def test_indices_are_never_given_twice(path: Path) -> None:
    async def before(pool: Pool) -> None:
        assert await pool.reserve_indices(SPEC, EPOCH, 3) == range(3)
        assert await pool.reserve_indices(SPEC, EPOCH + 1, 2) == range(2)

    async def after(pool: Pool) -> None:
        assert await pool.reserve_indices(SPEC, EPOCH, 2) == range(3, 5)
        assert len(await pool.reserve_indices(SPEC, EPOCH, 10_000)) == MAX_INDEX - 5
        assert len(await pool.reserve_indices(SPEC, EPOCH, 1)) == 0

    with_pool(path, before)
    with_pool(path, after)


# The event loop


def test_the_loop_stays_free_while_the_disk_is_busy(path: Path) -> None:
    async def use(pool: Pool) -> None:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        adding = asyncio.create_task(pool.add_local("me", [new_group()], NOW))
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert await pool.external_candidates(NOW) == [], "readers do not wait for writers"
        assert not adding.done()
        other.execute("COMMIT")
        other.close()
        assert len(await adding) == 1

    with_pool(path, use)


def test_many_callers_at_once(path: Path) -> None:
    async def use(pool: Pool) -> None:
        ids = await asyncio.gather(*(pool.add_local("me", [new_group(i)], NOW) for i in range(200)))
        assert len({i for [i] in ids}) == 200

    with_pool(path, use)


def test_a_closed_pool_says_so(path: Path) -> None:
    async def run() -> None:
        pool = await Pool.open(path, RolloutsSection())
        await pool.close()
        await pool.close()
        with pytest.raises(PoolError, match="the pool is closed"):
            await pool.stats()

    asyncio.run(run())


# Bad files


async def nothing(pool: Pool) -> None:
    pass


def test_a_newer_schema_is_refused_with_the_cure(path: Path) -> None:
    with_pool(path, nothing)
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(PoolError, match=r"pool\.sqlite: made by a newer sapo-node .*update sapo-node"):
        with_pool(path, nothing)


def test_another_programs_database_is_left_alone(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE theirs (x)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(PoolError, match="another program's database"):
        with_pool(path, nothing)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database(path: Path) -> None:
    path.write_text("not a database, " * 100)
    with pytest.raises(PoolError, match=r"the file is damaged .*move it away"):
        with_pool(path, nothing)


def test_damage_found_later_says_the_same(path: Path) -> None:
    async def fill(pool: Pool) -> None:
        await pool.add_local("me", [new_group(i, question="?" * 3000) for i in range(50)], NOW)

    async def read(pool: Pool) -> None:
        with pytest.raises(PoolError, match=r"the file is damaged .*move it away"):
            await pool.local_candidates(NOW, 0, 0)

    with_pool(path, fill)
    data = bytearray(path.read_bytes())
    data[4096 * 10 :] = b"\xa5" * (len(data) - 4096 * 10)
    path.write_bytes(data)
    with_pool(path, read)


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"cannot be written; give this user write access"):
        with_pool(tmp_path / "nowhere" / "pool.sqlite", nothing)


PRELUDE = f"""
import asyncio, importlib.util, os, sys
from pathlib import Path
from sapo_node.config import RolloutsSection
from sapo_node.rollouts.pool import Pool, PoolError
spec = importlib.util.spec_from_file_location("here", {__file__!r})
here = importlib.util.module_from_spec(spec)
spec.loader.exec_module(here)
NOW, new_group = here.NOW, here.new_group
path = Path(sys.argv[1])
"""


def process(body: str, path: Path, prefix: Sequence[str] = ()) -> "subprocess.Popen[str]":
    """A real process that runs `body`."""
    command = [*prefix, sys.executable, "-c", PRELUDE + textwrap.dedent(body), str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="root is needed to become somebody who may not write")
@pytest.mark.parametrize("existing", [True, False])
def test_a_file_or_folder_that_may_not_be_written(existing: bool) -> None:
    body = """
        os.setgid(65534)
        os.setuid(65534)
        try:
            asyncio.run(Pool.open(path, RolloutsSection()))
        except PoolError as error:
            print(error)
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "pool.sqlite"
        if existing:
            with_pool(path, nothing)
        told, errors = process(body, path).communicate(timeout=60)
    assert told.startswith(f"{path}: cannot be written; give this user write access"), errors


@pytest.mark.skipif(os.geteuid() != 0, reason="root is needed to mount a small disk")
def test_a_full_disk_is_told_and_survived(tmp_path: Path) -> None:
    """The mount lives in the child's own namespace and goes with it."""
    body = """
        async def fill():
            pool = await Pool.open(path, RolloutsSection())
            ids = []
            try:
                for i in range(2000):
                    ids += await pool.add_local("me", [new_group(i, question="?" * 4000)], NOW)
            except PoolError as error:
                print(error)
            stored = [c.group_id for c in await pool.local_candidates(NOW, 0, 0)]
            print("kept all" if stored == ids else (stored, ids))
            await pool.close()
        asyncio.run(fill())
    """
    mount = f'mount -t tmpfs -o size=1m none {tmp_path} && exec "$@"'
    child = process(body, tmp_path / "pool.sqlite", ["unshare", "-m", "sh", "-c", mount, "sh"])
    told, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    assert "free some space there" in told
    assert told.endswith("kept all\n"), told


@pytest.mark.parametrize("lines", [1, 20, 60])
def test_kill_9_loses_nothing_that_was_promised(path: Path, lines: int) -> None:
    """Whatever was printed had been added, used and counted before the kill, and must still be so."""
    body = """
        async def run():
            pool = await Pool.open(path, RolloutsSection())
            for i in range(4096):
                [group_id] = await pool.add_external("peer", i.to_bytes(32, "big"), [new_group(i)], NOW)
                assert await pool.consume([group_id], i)
                print(i, group_id, await pool.next_seq("batch"), flush=True)
        asyncio.run(run())
    """
    with process(body, path) as child:
        assert child.stdout is not None
        printed = [child.stdout.readline() for _ in range(lines)]
        child.kill()
        printed += [line for line in child.stdout if line.endswith("\n")]
    indices, ids, seqs = zip(*(map(int, line.split()) for line in printed), strict=True)

    async def check(pool: Pool) -> None:
        assert (await pool.stats()).external >= len(ids) >= lines
        assert await pool.consume(ids, indices[-1]) == [], "used stays used, whatever the round"
        assert await pool.known("peer", wire(*map(new_group, indices))) == [True] * len(ids)
        assert await pool.next_seq("batch") > seqs[-1]

    with_pool(path, check)
