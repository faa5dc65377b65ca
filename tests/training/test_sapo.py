"""The sampler is pure, so its promises are tested as properties over random swarms."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapo_node.config import RolloutsSection, TrainingSection
from sapo_node.training.sapo import (
    Candidate,
    RoundPlan,
    coverage,
    informative,
    learnability,
    novelty,
    peer_cap,
    plan_round,
    teaches,
)

MIXED = (1.0, 0.0, 0.0, 0.0)
FLAT = (0.0, 0.0, 0.0, 0.0)


def group(group_id: int, **changes: Any) -> Candidate:
    fields: dict[str, Any] = {
        "producer": "peer-0",
        "task": "gcd",
        "question_sha256": group_id.to_bytes(32, "big"),
        "rewards": MIXED,
        "age_seconds": 1.0,
    }
    return Candidate(group_id=group_id, **(fields | changes))


def own(*rewards: tuple[float, ...]) -> list[Candidate]:
    return [group(1000 + i, producer="me", rewards=r) for i, r in enumerate(rewards)]


def swarm(groups: int, peers: int = 4, **changes: Any) -> list[Candidate]:
    return [group(i, producer=f"peer-{i % peers}", **changes) for i in range(groups)]


def plan(local: list[Candidate], external: list[Candidate], seed: int = 0, **training: Any) -> RoundPlan:
    return plan_round(TrainingSection(**training), RolloutsSection(), local, external, random.Random(seed))


candidates = st.lists(
    st.builds(
        group,
        group_id=st.integers(0, 10**6),
        producer=st.sampled_from([f"peer-{i}" for i in range(6)]),
        task=st.sampled_from(["gcd", "bf", "calendar"]),
        question_sha256=st.integers(0, 12).map(lambda i: i.to_bytes(32, "big")),
        rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8).map(tuple),
        age_seconds=st.floats(0, 600),
        uses=st.integers(0, 2),
        source=st.sampled_from(["", "", "8.8.8.0/24", "9.9.9.0/24"]),
        aged=st.booleans(),
    ),
    max_size=60,
    unique_by=lambda c: c.group_id,
)
trainings = st.builds(
    TrainingSection,
    local_groups=st.integers(1, 6),
    external_groups=st.integers(0, 12),
    rule=st.sampled_from(["paper", "capped"]),
    strategy=st.sampled_from(["uniform", "learnability", "coverage", "novelty"]),
    local_zero_advantage=st.sampled_from(["keep", "refill", "resample"]),
    on_shortage=st.sampled_from(["local", "fewer", "wait"]),
)
own_groups = st.lists(st.sampled_from([MIXED, FLAT]), max_size=20).map(lambda rewards: own(*rewards))


@settings(max_examples=300, deadline=None)
@given(trainings, own_groups, candidates, st.integers(0, 2**32))
def test_bounds_hold_in_every_swarm(
    training: TrainingSection, local: list[Candidate], external: list[Candidate], seed: int
) -> None:
    rollouts = RolloutsSection()
    result = plan_round(training, rollouts, local, external, random.Random(seed))
    by_id = {c.group_id: c for c in external}
    chosen = [by_id[i] for i in result.external_ids]

    assert len(set(result.external_ids)) == len(chosen), "without replacement"
    assert all(informative(c.rewards) for c in chosen)
    assert all(c.age_seconds <= rollouts.max_age_seconds and c.uses < rollouts.max_external_uses for c in chosen)

    total = training.local_groups + training.external_groups
    assert len(result.local_ids) + len(chosen) <= total
    if training.local_zero_advantage != "refill":
        assert len(chosen) <= training.external_groups
    assert result.shortage == max(0, training.external_groups - len(chosen))
    assert not set(result.local_ids) & set(result.discarded_ids)
    if training.on_shortage == "local" and result.need_local == 0:
        assert len(result.local_ids) + len(chosen) == total, "a batch that lacks nothing is full"

    if training.rule == "capped":
        usable = [
            c
            for c in external
            if informative(c.rewards)
            and c.age_seconds <= rollouts.max_age_seconds
            and c.uses < rollouts.max_external_uses
        ]
        if not any(c.aged for c in usable):
            assert all(count <= result.peer_cap for count in Counter(c.counts_for for c in chosen).values())
        if training.local_zero_advantage != "refill" and any(c.aged for c in usable):
            assert sum(not c.aged for c in chosen) <= training.external_groups // 2
        assert len({c.question_sha256 for c in chosen}) == len(chosen)


@given(trainings, own_groups, candidates, st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_the_generator_alone_decides(
    training: TrainingSection, local: list[Candidate], external: list[Candidate], seed: int
) -> None:
    first, second = (plan_round(training, RolloutsSection(), local, external, random.Random(seed)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("rule", ["paper", "capped"])
def test_external_choice_is_uniform(rule: str) -> None:
    groups, wanted, rounds = 12, 3, 4000
    external = swarm(groups, peers=groups)
    rng = random.Random(1)
    training = TrainingSection(external_groups=wanted, rule=rule)
    counts: Counter[int] = Counter()
    for _ in range(rounds):
        counts.update(plan_round(training, RolloutsSection(), own(MIXED), external, rng).external_ids)
    expected = rounds * wanted / groups
    chi_square = sum((counts[i] - expected) ** 2 / expected for i in range(groups))
    assert chi_square < 31.3  # 99.9 % of chi-square with 11 degrees of freedom


@pytest.mark.parametrize(("setting", "chosen"), [("drop", [1]), ("keep", [0, 1])])
def test_groups_without_advantage_are_chosen_only_where_that_is_asked_for(setting: str, chosen: list[int]) -> None:
    external = [group(0, rewards=FLAT), group(1, rewards=MIXED)]
    assert sorted(plan([], external, external_zero_advantage=setting).external_ids) == chosen


def test_paper_has_no_cap() -> None:
    external = [*swarm(40, peers=1), group(99, producer="quiet")]
    result = plan([], external, external_groups=8)
    assert len(result.external_ids) == 8
    assert sum(i != 99 for i in result.external_ids) >= 7


@pytest.mark.parametrize(
    ("wanted", "peers", "cap"), [(4, 1, 4), (4, 2, 2), (8, 3, 3), (8, 8, 2), (8, 100, 2), (6, 5, 2), (4, 0, 4)]
)
def test_peer_cap(wanted: int, peers: int, cap: int) -> None:
    assert peer_cap(wanted, peers) == cap


def test_capped_holds_back_a_loud_peer() -> None:
    loud = [group(i, producer="loud") for i in range(100)]
    quiet = [group(200 + i, producer=f"quiet-{i}") for i in range(7)]
    result = plan([], loud + quiet, external_groups=8, rule="capped")
    assert sum(i < 100 for i in result.external_ids) <= result.peer_cap == 2
    assert len(result.external_ids) == 8


def test_a_single_peer_may_fill_the_whole_share() -> None:
    result = plan(own(MIXED), swarm(10, peers=1), external_groups=4, rule="capped")
    assert len(result.external_ids) == 4
    assert (result.usable_peers, result.shortage) == (1, 0)


def test_silo_draws_what_the_swarm_lacks() -> None:
    result = plan(own(MIXED, MIXED), [], local_groups=2, external_groups=3)
    assert (result.shortage, result.need_local) == (3, 3)
    filled = plan(own(*[MIXED] * 5), [], local_groups=2, external_groups=3)
    assert (filled.need_local, len(filled.local_ids)) == (0, 5)


@pytest.mark.parametrize(("on_shortage", "wait"), [("fewer", False), ("wait", True)])
def test_other_ways_through_a_shortage_draw_nothing(on_shortage: str, wait: bool) -> None:
    result = plan(own(MIXED, MIXED), swarm(1), local_groups=2, external_groups=3, on_shortage=on_shortage)
    assert (result.need_local, result.wait, result.shortage) == (0, wait, 2)
    assert (len(result.local_ids), len(result.external_ids)) == (2, 1)


def test_wait_ends_when_nothing_is_missing() -> None:
    assert not plan(own(MIXED), swarm(8), local_groups=1, external_groups=3, on_shortage="wait").wait


def test_keep_trains_on_own_groups_without_advantage() -> None:
    result = plan(own(FLAT, FLAT), swarm(9), local_groups=2, external_groups=2)
    assert result.local_ids == [1000, 1001]
    assert (result.discarded_ids, result.resample) == ([], 0)


def test_refill_replaces_own_groups_without_advantage() -> None:
    options = {"local_groups": 3, "external_groups": 2, "local_zero_advantage": "refill"}
    result = plan(own(FLAT, MIXED, FLAT), swarm(9), **options)
    assert (result.local_ids, result.discarded_ids) == ([1001], [1000, 1002])
    assert len(result.external_ids) == 4


def test_refill_keeps_those_that_nobody_replaces() -> None:
    options = {"local_groups": 3, "external_groups": 2, "local_zero_advantage": "refill"}
    result = plan(own(FLAT, MIXED, FLAT), swarm(3), **options)
    assert (result.local_ids, result.discarded_ids) == ([1001, 1002], [1000])
    assert (len(result.external_ids), result.shortage) == (3, 0)


def test_resample_prefers_own_groups_with_advantage() -> None:
    options = {"local_groups": 2, "external_groups": 0, "local_zero_advantage": "resample"}
    first = plan(own(FLAT, MIXED), [], **options)
    assert (first.local_ids, first.resample, first.discarded_ids) == ([1001, 1000], 1, [])
    again = plan(own(FLAT, MIXED, MIXED), [], **options)
    assert (again.local_ids, again.resample, again.discarded_ids) == ([1001, 1002], 0, [1000])


def test_drops_are_counted_by_reason() -> None:
    external = [
        group(1, rewards=FLAT),
        group(2, rewards=(1.0, 1.0)),
        group(3, age_seconds=301.0),
        group(4, uses=1),
        group(5),
    ]
    result = plan(own(MIXED), external)
    assert (result.dropped_zero_advantage, result.dropped_stale, result.external_ids) == (2, 2, [5])


def test_learnability_is_p_times_one_minus_p() -> None:
    half, quarter = group(1, rewards=(1.0, 0.0)), group(2, rewards=MIXED)
    assert learnability([half, quarter], {}) == pytest.approx([0.25, 0.1875])


def test_learnability_draws_in_proportion() -> None:
    external = [group(0, rewards=(1.0, 0.0) * 32), group(1, rewards=(1.0,) + (0.0,) * 63)]
    training = TrainingSection(external_groups=1, rule="capped", strategy="learnability")
    rng = random.Random(3)
    picks = Counter(plan_round(training, RolloutsSection(), [], external, rng).external_ids[0] for _ in range(4000))
    w0, w1 = learnability(external, {})
    assert picks[0] / 4000 == pytest.approx(w0 / (w0 + w1), abs=0.02)


def test_coverage_gives_a_rare_task_as_much_as_a_common_one() -> None:
    external = [*(group(i, task="common") for i in range(9)), group(9, task="rare")]
    weights = coverage(external, {})
    assert weights[9] == pytest.approx(sum(weights[:9]))


def test_learnability_survives_rewards_that_hardly_differ() -> None:
    result = plan(own(MIXED), [group(1, rewards=(0.0, 1e-200))], rule="capped", strategy="learnability")
    assert result.external_ids == [1]


@pytest.mark.parametrize(("rewards", "expected"), [((), False), ((1.0,), False), (FLAT, False), (MIXED, True)])
def test_informative(rewards: tuple[float, ...], expected: bool) -> None:
    assert informative(rewards) is expected


@pytest.mark.parametrize(
    ("rewards", "cut", "settings", "expected"),
    [
        ((1.0, 0.0), (False, False), {}, True),
        ((1.0, 0.0), (False, True), {}, True),
        ((1.0, 0.0), (True, False), {}, False),  # it would say only what not to write
        ((1.0, 0.0), (True, True), {}, False),
        ((1.0, 0.0), (True, True), {"mask_truncated": False}, True),
        ((1.0, 1.0, 0.0), (True, False, False), {}, True),
        ((1.0, 0.5, 0.0), (True, False, True), {}, False),  # what is left has no advantage
        ((1.0, 1.0), (False, False), {}, False),
        ((1.0, 1.0 - 1e-9), (False, False), {}, False),
    ],
)
def test_a_group_teaches_if_a_completion_that_counts_is_better_than_others(
    rewards: tuple[float, ...], cut: tuple[bool, ...], settings: dict[str, Any], expected: bool
) -> None:
    assert teaches(rewards, cut, TrainingSection(**settings)) is expected


def test_novelty_prefers_tasks_that_this_node_cannot_do() -> None:
    external = [group(0, task="known"), group(1, task="known"), group(2, task="half"), group(3, task="never drawn")]
    weights = novelty(external, {"known": 1.0, "half": 0.5})
    assert weights[0] == weights[1] < 1e-6
    assert weights[2:] == [0.5, 1.0]


def test_a_strategy_sees_own_rewards() -> None:
    external = [group(i, task="known", producer=f"peer-{i}") for i in range(20)] + [group(99, task="new")]
    training = TrainingSection(external_groups=1, rule="capped", strategy="novelty")
    for seed in range(20):
        chosen = plan_round(training, RolloutsSection(), [], external, random.Random(seed), {"known": 1.0})
        assert chosen.external_ids == [99]


def crowd(newcomers: int, aged: int, each: int = 4) -> list[Candidate]:
    """Groups of peers on networks of their own: newcomers from id 0, aged peers behind them."""
    return [
        group(i, producer=f"peer-{i // each}", source=f"net-{i // each}", aged=i >= newcomers * each)
        for i in range((newcomers + aged) * each)
    ]


@pytest.mark.parametrize("newcomers", [4, 40, 400])
def test_half_of_j_is_left_to_aged_peers_however_many_newcomers_there_are(newcomers: int) -> None:
    external = crowd(newcomers, aged=4)
    for seed in range(20):
        result = plan([], external, seed=seed, external_groups=8, rule="capped")
        assert len(result.external_ids) == 8
        assert sum(i >= newcomers * 4 for i in result.external_ids) >= 4


def test_what_aged_peers_cannot_fill_of_their_half_is_a_shortage() -> None:
    result = plan([], crowd(40, aged=1, each=1), external_groups=8, rule="capped")
    assert len(result.external_ids) == 5
    assert (40 in result.external_ids, result.shortage, result.need_local) == (True, 3, 7)


def test_one_aged_peer_may_fill_its_half() -> None:
    result = plan([], crowd(40, aged=1, each=8), external_groups=8, rule="capped")
    assert sum(i >= 320 for i in result.external_ids) == 4
    assert len(result.external_ids) == 8


def test_without_aged_peers_newcomers_have_all_of_j() -> None:
    assert len(plan([], crowd(8, aged=0), external_groups=8, rule="capped").external_ids) == 8


def test_an_aged_peer_without_usable_groups_holds_nothing_back() -> None:
    old = group(1000, producer="old", aged=True, rewards=FLAT)
    assert plan([], [*crowd(8, aged=0), old], external_groups=8, rule="capped").shortage == 0


def test_peers_of_one_network_have_one_share() -> None:
    sybils = [group(i, producer=f"sybil-{i}", source="8.8.8.0/24") for i in range(100)]
    honest = [group(100 + i, producer=f"peer-{i % 4}", source=f"net-{i % 4}") for i in range(16)]
    result = plan([], sybils + honest, external_groups=8, rule="capped")
    assert (result.usable_peers, result.usable_sources, result.peer_cap) == (104, 5, 2)
    assert len(result.external_ids) == 8
    assert sum(i < 100 for i in result.external_ids) <= 2


def test_the_papers_rule_asks_neither_for_networks_nor_for_age() -> None:
    plain = [group(i, producer=f"peer-{i}") for i in range(40)]
    told = [group(i, producer=f"peer-{i}", source="8.8.8.0/24", aged=i < 2) for i in range(40)]
    assert plan([], plain, external_groups=8).external_ids == plan([], told, external_groups=8).external_ids
