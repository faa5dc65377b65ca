"""What is run, on which bases and seeds, for how long. Written before the runs; every run of it is reported.

Tuning and the search for a rule use base-0 and seeds 0-4. The confirmation uses bases and seeds that nothing was chosen
by.
"""

from .swarm import Run

ROUNDS = 100  # the horizon: held-out scores of the plain arms still rise there, and a run takes about a CPU minute

MAKE = "python scripts/make_tiny_model.py --preset benchmark --weaken-steps 110 --seed"
BASES = {f"base-{seed}": f"{MAKE} {seed}" for seed in (0, 11, 12, 13)}

RATES = (1e-4, 3e-4, 1e-3)
TUNED = ("8/0", "4/4", "drop+refill", "yield")


def _lr() -> list[Run]:
    """1. Learning rates; seed by seed, so that whatever is finished compares all arms."""
    return [Run("lr", arm, "base-0", seed, lr, ROUNDS) for seed in range(3) for lr in RATES for arm in TUNED]


STAGES = {"lr": _lr()}
REFERENCES = ("8/0", "4/4")  # every arm is compared with these
