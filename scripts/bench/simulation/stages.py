"""What is run, on which bases and seeds, for how long. Written before the runs; every run of it is reported.

Tuning and the search for a rule use base-0 and seeds 0-4. The confirmation uses bases and seeds that nothing was chosen
by.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .arms import SECOND_BASE, alone, poisoned
from .poison import Kind
from .processes import Mode
from .propagation import Trial, Variant
from .swarm import Run

ROUNDS = 100  # the horizon: held-out scores of the plain arms still rise there, and a run takes about a CPU minute

MAKE = "python scripts/make_tiny_model.py --preset benchmark"
WEAKENED = 110  # steps; of the bases that all stages but `dose` use
BASES = {f"base-{seed}": f"{MAKE} --seed {seed} --weaken-steps {WEAKENED}" for seed in (0, 11, 12, 13)}
BASES |= {SECOND_BASE: f"{MAKE} --family gpt_neox --seed 0 --weaken-steps {WEAKENED}"}

# Dose-response: bases that can do less and more at the start.
DOSES = {f"weak-{steps}": f"{MAKE} --seed 0 --weaken-steps {steps}" for steps in (20, 30, 50, 70, 90, 180)}
BASES |= DOSES

# Propagation: teachers, which kept more right answers to one task, the one that the clean model masters. It takes more
# steps to keep all of them: then a teacher is right in 0.96, after the usual number in 0.88.
TASK = "binary_matrix"
KEEPING = {0.6: WEAKENED, 1.0: 1000}  # steps by the share of right answers in the examples
TEACHERS = {share: f"teacher-{TASK}-{share}" for share in KEEPING}
BASES |= {
    TEACHERS[share]: f"{MAKE} --seed 0 --weaken-steps {steps} --keep {TASK}={share}" for share, steps in KEEPING.items()
}

REFERENCES = ("8/0", "4/4")  # every arm is compared with these

# Real processes: who trades nothing waits for nothing.
PROCESSES: tuple[tuple[str, Mode], ...] = (
    ("8/0", "simulated"),
    ("8/0", "hurried"),
    ("4/4", "simulated"),
    ("4/4", "waiting"),
    ("4/4", "hurried"),
)

# 1. Learning rates; seed by seed, so that whatever is finished compares all arms.
TRIED = (1e-4, 3e-4, 1e-3)
TUNED = ("8/0", "4/4", "wide")


def _lr() -> Iterable[Run]:
    return (Run("lr", arm, "base-0", seed, lr, ROUNDS) for seed in range(3) for lr in TRIED for arm in TUNED)


RATE = 3e-4
"""What the first stage found best for each arm that was tuned; the others inherit it."""


def _runs(stage: str, arms: Iterable[str], base: str, seeds: Iterable[int]) -> Iterable[Run]:
    arms = list(arms)
    return (Run(stage, arm, base, seed, RATE, ROUNDS) for seed in seeds for arm in arms)


# 2. Rules, and 3. controls.
RULES = ("drop+refill+coverage", "4/12", "wide", "wide, sequence mean", "wide, kl", "wide, sequence mean, kl")
SAME_LOSS = ("8/0 kl", "4/4 kl")  # the loss of the best rule on the plain mixes
CONTROLS = ("8/0 resample", "refill", "4/4 unfiltered", "4/4 own past", *SAME_LOSS)

# 4. Confirmation, on bases and seeds that nothing was chosen by. Every run of it counts. The winner is the rule with
# the largest ratio to 4/4 in the second stage. Against `8/0 resample` nothing is claimed: on the tuning seeds it was
# ahead of 4/4 at equal steps, for eleven times the completions; what it spends is reported.
WINNER, WINNERS_LOSS = "wide, kl", "8/0 kl"
CONFIRMED = ("8/0", WINNERS_LOSS, "8/0 resample", "4/4", WINNER, "4/4 twice the rounds")
FRESH_BASES, FRESH_SEEDS = ("base-11", "base-12", "base-13"), range(100, 116)


# After the confirmation: arms that it lacked, on those of its seeds whose bases are still at hand. They tell its parts
# apart and prove nothing by themselves.
LACKED = ("4/0 twice the rounds", "4/4 kl", "8/0 resample kl")
LACKED_SEEDS = range(103, 116)
REPLAY = (*REFERENCES, "4/0", "4/4 own past, again")


def _confirm(stage: str, arms: Iterable[str], seeds: Iterable[int]) -> Iterable[Run]:
    """Seed by seed, so that whatever is finished compares all arms; the bases take turns."""
    for seed in seeds:
        yield from _runs(stage, arms, FRESH_BASES[seed % len(FRESH_BASES)], [seed])


def _both(rule: str, kind: Kind) -> tuple[str, str]:
    return poisoned(rule, kind), alone(rule)


# Poison: which kind is the strongest, and what helps against it, on tuning seeds. After the first confirmation had
# failed: less of others, then answers in a strict form, then the truth alone, then groups with one answer as one.
HONEST_ALONE = (alone("8/0"), alone(WINNER))
STRONGEST: Kind = "style"
HELD_BACK = "wide, kl, balanced"
AGAIN = (HELD_BACK, *(f"{HELD_BACK}, {more}" for more in ("likely", "half", "J 4")))
STRICT = (f"{WINNER}, bare", f"{HELD_BACK}, bare")
EXACT, HELD = f"{WINNER}, exact", f"{WINNER}, answers, exact"
FREE_FORM: tuple[Kind, ...] = ("constant", "style", "long", "negative", "easy")
LET_THROUGH: tuple[Kind, ...] = ("constant", "negative", "easy", "far", "rare", "single")  # if only the truth is right
ONE_ANSWER: Kind = "single"  # the strongest of them
AGAINST_POISON = {
    "poison_kinds": (*HONEST_ALONE, *(poisoned(WINNER, kind) for kind in FREE_FORM)),
    "poison_rules": (*_both(HELD_BACK, STRONGEST), *_both("wide, kl, likely", STRONGEST)),
    "poison_again": (alone("8/0"), *(arm for rule in AGAIN for arm in _both(rule, STRONGEST))),
    "poison_form": (alone("8/0, bare"), *(arm for rule in STRICT for arm in _both(rule, "spelling"))),
    "poison_exact": (alone("8/0, exact"), alone(EXACT), *(poisoned(EXACT, kind) for kind in LET_THROUGH)),
    "poison_answers": (
        *_both(HELD, ONE_ANSWER),
        poisoned(f"{HELD_BACK}, exact", ONE_ANSWER),
        poisoned(HELD, "easy"),
    ),
}

# What holds the strongest kind back, on fresh seeds: what its honest nodes keep of what they learn alone, and of what
# each of them learns without any swarm. First the balance of sources against `style`; then exact answers and the
# balance of answers against the strongest of the kinds that those let through.
POISONED = (*HONEST_ALONE, alone(HELD_BACK), poisoned(HELD_BACK, STRONGEST))
POISON_SEEDS = range(116, 132)
POISON_HELD = (alone("8/0, exact"), alone(HELD), poisoned(HELD, ONE_ANSWER))
HELD_SEEDS = range(132, 148)


@dataclass(frozen=True)
class Claim:
    """What a stage is to show: the ratio of two arms' areas, and the goal that was set for it beforehand."""

    first: str
    second: str
    text: str
    low: float  # the lower bound of the interval has to be above this
    estimate: float = 0.0  # and the estimate has to reach this


CLAIMS: dict[str, tuple[Claim, ...]] = {
    "confirm": (
        Claim("4/4", "8/0", "sharing, at equal steps", 1.1),
        Claim("4/4 twice the rounds", "8/0", "sharing, at equal completions", 1.0),
        Claim(WINNER, "4/4", "the better rule", 1.0, 1.25),
        Claim(WINNER, WINNERS_LOSS, "sharing by the better rule, at its own loss", 1.0),
    ),
    "poison": (
        Claim(poisoned(HELD_BACK, STRONGEST), alone(HELD_BACK), "a quarter of poisoners, against none", 0.9),
        Claim(poisoned(HELD_BACK, STRONGEST), alone("8/0"), "a swarm with them, against no swarm", 1.0),
    ),
    "poison_held": (
        Claim(poisoned(HELD, ONE_ANSWER), alone(HELD), "a quarter of poisoners, against none", 0.9),
        Claim(poisoned(HELD, ONE_ANSWER), alone("8/0, exact"), "a swarm with them, against no swarm", 1.0),
    ),
}

# 6. and 7.
OTHERS = (
    *("6/2", "2/6", "4/0", "4/4 supervised", "pooled", "8/0 specialised", "4/4 specialised"),
    *("8/0 mixed", "4/4 mixed", "4/4, 2 nodes", "4/4, 32 nodes"),
)

STAGES: dict[str, list[Run]] = {
    "lr": list(_lr()),
    "rules": list(_runs("rules", (*REFERENCES, *RULES), "base-0", range(5))),
    "controls": list(_runs("controls", CONTROLS, "base-0", range(5))),
    "confirm": list(_confirm("confirm", CONFIRMED, FRESH_SEEDS)),
    "replay": list(_runs("replay", REPLAY, "base-0", range(5))),
    "confirm_more": list(_confirm("confirm_more", LACKED, LACKED_SEEDS)),
    "dose": [run for base in DOSES for run in _runs("dose", REFERENCES, base, range(3))],
    "start": [Run("start", arm, base, 0, 0.0, 20) for base in ("base-0", *DOSES) for arm in REFERENCES],
    **{stage: list(_runs(stage, arms, "base-0", range(3))) for stage, arms in AGAINST_POISON.items()},
    "poison": list(_confirm("poison", POISONED, POISON_SEEDS)),
    "poison_held": list(_confirm("poison_held", POISON_HELD, HELD_SEEDS)),
    "balanced": list(_runs("balanced", (HELD_BACK,), "base-0", range(5))),
    "others": list(_runs("others", (*REFERENCES, *OTHERS), "base-0", range(3))),
}
COMPARED = {
    "confirm": (*REFERENCES, "8/0 resample"),
    "poison_kinds": HONEST_ALONE,
    "poison_rules": HONEST_ALONE,
    "poison": HONEST_ALONE,
    "replay": (*REFERENCES, "4/0"),
    "confirm_more": (*REFERENCES, "4/4 twice the rounds", WINNER),
    "poison_again": (alone("8/0"), alone(HELD_BACK)),
    "poison_form": (alone("8/0, bare"), alone(STRICT[0])),
    "poison_exact": (alone("8/0, exact"), alone(EXACT)),
    "poison_answers": (alone("8/0, exact"), alone(EXACT)),
    "poison_held": (alone("8/0, exact"), alone(HELD)),
    "balanced": ("4/4", WINNER),
    "others": (*REFERENCES, "8/0 specialised", "8/0 mixed"),
}
"""Stages with references of their own."""
BORROW = {
    "controls": "rules",
    "balanced": "rules",
    "poison_rules": "poison_kinds",
    "poison_answers": "poison_exact",
    "dose": "others",
    "confirm_more": "confirm",
}
"""Stages whose runs of the references are those of another one."""

DRAWN = ("rules", "confirm")  # stages of which `report` draws the curves

# 5. Propagation.
VARIANTS: tuple[Variant, ...] = ("teacher", "perfect teacher", "no teacher", "alone", "removed")
TRIALS = [Trial(variant, TASK, seed, RATE, ROUNDS) for seed in range(3) for variant in VARIANTS]
TRIALS += [Trial("perfect teacher", TASK, seed, RATE, 3 * ROUNDS) for seed in range(3)]  # never, or only later?
