"""The SAPO sampler: which groups make this round's training batch.

Source: "Sharing is Caring: Efficient LM Post-Training with Collective RL Experience Sharing", arXiv 2509.08721,
section 3, Algorithm 1. Its names are used here: a node draws B tasks a round, samples L completions for each (a
group), shares S groups, and trains on I groups of its own and J of the swarm's. How the J are chosen is left to the
node; the published experiments drop those without advantage and draw uniformly from the rest, which is rule `paper`.

Rule `capped` is ours, for swarms that anyone may join. It goes through the same groups in a random order weighted by a
strategy and leaves out

- groups of a source that already has its share, max(ceil(J / 4), ceil(J / usable sources)): one loud peer cannot become
  the whole batch, and few can still fill it. A source is a peer, or all peers of one network, as the caller says;
- groups on a question that was already chosen: a second copy teaches less than another question;
- more than J / 2 groups of peers without a day of accepted work, once a peer that has it offers a usable group. Ids are
  free, so newcomers can be any number; what the aged ones cannot fill of their half is a shortage.

Under both rules a group has to be fresh (age and uses within the owner's settings) and, unless
`external_zero_advantage` keeps the others for comparison, informative.

Everything here is pure: candidates and a random generator in, a plan out. The caller draws what the plan says is
missing and plans again; nothing is remembered in between.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from sapo_node.config import RolloutsSection, TrainingSection
from sapo_node.training.advantages import advantages

PEER_SHARE: Final = 0.25
"""Share of J that a source may have under `capped` however many there are. With four or more it binds only the loud
ones; below four the other bound, an equal share, is larger."""

AGED_SHARE: Final = 0.5
"""Share of J that is left to aged peers under `capped`, once one of them has a usable group."""

MIN_WEIGHT: Final = 1e-9
"""Graded rewards can differ by less than a double's square resolves; such a group is unlikely, not impossible."""


class Candidate(Struct, frozen=True, kw_only=True):
    """What the sampler needs to know of a group; the texts stay in the pool."""

    group_id: int  # the pool's row
    producer: str  # peer id
    task: str
    question_sha256: bytes
    rewards: tuple[float, ...]  # L of them, computed by this node
    age_seconds: float
    uses: int = 0  # rounds that trained on it
    first_drawn: bool = True  # False for own groups drawn to fill a shortage or to replace others
    source: str = ""  # network of the producer, as this node sees it; empty: the producer counts by itself
    aged: bool = False  # whether this node has known the producer's work for a day

    @property
    def counts_for(self) -> str:
        """What has the share that this group is taken from."""
        return self.source or self.producer


class RoundPlan(Struct, frozen=True, kw_only=True):
    """One round's training batch, and what it still lacks.

    The batch is `local_ids` and `external_ids`. It may be trained on as it is; if `need_local`, `resample` or `wait`
    is set and the caller has patience left, it draws (or waits) and plans again with the larger pool.
    """

    local_ids: list[int]
    external_ids: list[int]
    discarded_ids: list[int]  # own groups decided against (refill, resample): drop them, or they come back next round
    shortage: int  # external groups that are missing to J
    need_local: int  # own groups to draw: missing to I, and under `on_shortage: local` to I + shortage
    resample: int  # own groups to draw again under `local_zero_advantage: resample`, beside `need_local`
    wait: bool  # under `on_shortage: wait`, whether there is something to wait for
    usable_peers: int  # producers with at least one fresh and informative group
    usable_sources: int  # of these, peers of one network counted once
    peer_cap: int  # most external groups of one source; the number wanted where there is no cap
    dropped_zero_advantage: int  # fresh external candidates whose rewards are all equal
    dropped_stale: int  # external candidates too old or used up


OwnRewards = Mapping[str, float]
"""Mean reward (0 to 1) of this node's own recent groups by task; tasks that it did not draw lately are missing."""

Strategy = Callable[[Sequence[Candidate], OwnRewards], list[float]]
"""Positive weights of usable external groups, in their order. A better rule is one more function of this shape."""


def informative(rewards: Sequence[float]) -> bool:
    """Whether the group has an advantage at all: False when all rewards are equal, or there are none."""
    return any(reward != rewards[0] for reward in rewards)


def teaches(rewards: Sequence[float], cut: Sequence[bool], training: TrainingSection) -> bool:
    """Whether a step on this group of another node leads the policy anywhere, as far as its rewards and what it says of
    the lengths of its completions tell: one of them is better than their mean, and has a weight in the loss. What only
    the policy's tokenizer tells is `rows.unfit`."""
    return informative(rewards) and any(
        advantage > 0 and not (truncated and training.mask_truncated)
        for advantage, truncated in zip(advantages(rewards, training.advantage), cut, strict=True)
    )


def uniform(candidates: Sequence[Candidate], own: OwnRewards) -> list[float]:
    """Every group alike."""
    return [1.0] * len(candidates)


def learnability(candidates: Sequence[Candidate], own: OwnRewards) -> list[float]:
    """p(1 - p), p being the share of right answers: most for questions that are answered half of the time.

    Computed as the variance of the rewards, which is the same for strict ones and also fits graded ones.
    """

    def variance(rewards: Sequence[float]) -> float:
        mean = fmean(rewards)
        return max(MIN_WEIGHT, fmean((reward - mean) ** 2 for reward in rewards))

    return [variance(candidate.rewards) for candidate in candidates]


def coverage(candidates: Sequence[Candidate], own: OwnRewards) -> list[float]:
    """Evenly over tasks, then over the groups of a task: a rare task weighs as much as a common one."""
    of_task = Counter(candidate.task for candidate in candidates)
    return [1.0 / of_task[candidate.task] for candidate in candidates]


def novelty(candidates: Sequence[Candidate], own: OwnRewards) -> list[float]:
    """As `coverage`, times the share of own answers to the task that are wrong: what others can do and we cannot."""
    weights = coverage(candidates, own)
    return [
        max(MIN_WEIGHT, weight * (1.0 - own.get(candidate.task, 0.0)))
        for weight, candidate in zip(weights, candidates, strict=True)
    ]


STRATEGIES: Final[dict[str, Strategy]] = {
    "uniform": uniform,
    "learnability": learnability,
    "coverage": coverage,
    "novelty": novelty,
}


def peer_cap(wanted: int, usable_sources: int) -> int:
    """Most external groups that one source may have in a batch of `wanted` under `capped`."""
    return max(math.ceil(PEER_SHARE * wanted), math.ceil(wanted / max(1, usable_sources)))


def aged_part(usable: Iterable[Candidate], wanted: int) -> int:
    """How many of the `wanted` groups newcomers may not have: half, once there is a usable group of an aged peer."""
    return math.ceil(AGED_SHARE * wanted) if any(candidate.aged for candidate in usable) else 0


def choose_uniform(usable: Sequence[Candidate], wanted: int, rng: random.Random) -> list[Candidate]:
    """Rule `paper`: up to `wanted` groups, uniformly without replacement."""
    return rng.sample(usable, min(wanted, len(usable)))


def choose_capped(
    usable: Sequence[Candidate], wanted: int, cap: int, weights: Sequence[float], rng: random.Random
) -> list[Candidate]:
    """Rule `capped`: weighted without replacement, one group a question, the aged peers' part first, and at most `cap`
    groups a source; aged sources that are too few to fill their part so share it evenly.

    Sorting by exponential waiting times of rate w is successive weighted sampling (Efraimidis and Spirakis 2006);
    leaving out a group that breaks a bound equals drawing from the groups that keep it.
    """
    waits = [rng.expovariate(weight) for weight in weights]
    order = [usable[i] for i in sorted(range(len(usable)), key=waits.__getitem__)]
    chosen: list[Candidate] = []
    of_source: Counter[str] = Counter()
    questions: set[bytes] = set()

    def take(candidates: Iterable[Candidate], limit: int, cap: int) -> None:
        for candidate in candidates:
            if len(chosen) >= limit:
                return
            if of_source[candidate.counts_for] < cap and candidate.question_sha256 not in questions:
                chosen.append(candidate)
                of_source[candidate.counts_for] += 1
                questions.add(candidate.question_sha256)

    part = aged_part(usable, wanted)
    aged = [candidate for candidate in order if candidate.aged]
    take(aged, part, max(cap, math.ceil(part / max(1, len({c.counts_for for c in aged})))))
    missing = part - len(chosen)
    take(order, wanted - max(0, missing), cap)
    return chosen


def plan_round(
    training: TrainingSection,
    rollouts: RolloutsSection,
    local: Sequence[Candidate],
    external: Sequence[Candidate],
    rng: random.Random,
    own_rewards: OwnRewards = MappingProxyType({}),
) -> RoundPlan:
    """Choose this round's batch from own unused groups (oldest first) and the swarm's.

    Own groups are taken in their order: a node draws its tasks at random, so the first I of B are a random choice.
    A shortage is what is missing to J external groups. Under `on_shortage: local`, and so in silo, I + shortage own
    groups are taken instead; `fewer` and `wait` leave the batch smaller.

    `local_zero_advantage` says what happens to own groups without advantage. `keep`: nothing, as in the paper.
    `refill`: external groups take their places as far as there are more than J; the others stay. `resample`: own
    groups with advantage go first, and the plan asks for as many draws as it still holds groups without.
    """
    fresh = [c for c in external if _is_fresh(c, rollouts)]
    usable = [c for c in fresh if training.external_zero_advantage == "keep" or informative(c.rewards)]
    sources = len({c.counts_for for c in usable})

    own = list(local)
    if training.local_zero_advantage == "resample":
        own.sort(key=lambda c: not informative(c.rewards))  # stable: oldest first within each half
    idle = [c for c in own[: training.local_groups] if not informative(c.rewards)]

    wanted = training.external_groups
    refill = len(idle) if training.local_zero_advantage == "refill" else 0
    cap = peer_cap(wanted + refill, sources) if training.rule == "capped" else wanted + refill
    if training.rule == "capped":
        weights = STRATEGIES[training.strategy](usable, own_rewards)
        chosen = choose_capped(usable, wanted + refill, cap, weights, rng)
    else:
        chosen = choose_uniform(usable, wanted + refill, rng)

    shortage = max(0, wanted - len(chosen))
    replaced = {c.group_id for c in idle[: max(0, len(chosen) - wanted)]}
    own_wanted = training.local_groups + (shortage if training.on_shortage == "local" else 0)
    taken = [c for c in own[:own_wanted] if c.group_id not in replaced]
    resample, passed_over = 0, replaced
    if training.local_zero_advantage == "resample":
        resample = sum(not informative(c.rewards) for c in taken)
        passed_over = {c.group_id for c in own[own_wanted:] if not informative(c.rewards)}
    return RoundPlan(
        local_ids=[c.group_id for c in taken],
        external_ids=[c.group_id for c in chosen],
        discarded_ids=sorted(passed_over),
        shortage=shortage,
        need_local=max(0, own_wanted - len(own)),
        resample=resample,
        wait=shortage > 0 and training.on_shortage == "wait",
        usable_peers=len({c.producer for c in usable}),
        usable_sources=sources,
        peer_cap=cap,
        dropped_zero_advantage=len(fresh) - len(usable),
        dropped_stale=len(external) - len(fresh),
    )


def _is_fresh(candidate: Candidate, rollouts: RolloutsSection) -> bool:
    return candidate.age_seconds <= rollouts.max_age_seconds and candidate.uses < rollouts.max_external_uses
