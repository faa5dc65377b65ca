"""Arms: what is compared. An arm is a set of settings laid over those that all arms share."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml

from sapo_node.config import NodeConfig

from .poison import Kind

REPOSITORY = Path(__file__).resolve().parent.parent.parent.parent
MIXTURE = REPOSITORY / "configs" / "demo.yaml"

LEFT_OUT = "propositional_logic"
"""ReasoningGYM's scorer gives one constant answer, "(P ∨ Q)", about 0.8 in it. A swarm that finds it gives it to every
question, and an arm's figure is then that of the round in which it did."""

SECOND_BASE = "neox-0"  # another family with another size and another tokenizer

PREFERENCE = 12.0  # weight of a specialised node's task, where the six others have 1: two of three questions


@dataclass(frozen=True)
class Arm:
    """One set of settings. `training`, `rollouts` and `tasks` are sections of a config."""

    name: str
    training: dict[str, Any] = field(default_factory=dict)
    rollouts: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, Any] = field(default_factory=dict)
    nodes: int = 8
    longer: int = 1  # times the rounds
    own_past: bool = False  # external groups are the node's own earlier ones, not those of others
    poisoners: int = 0  # hostile peers beside the nodes
    poison: Kind = "constant"
    supervised: bool = False  # others' right answers are plain targets, whatever the rest of their group was
    second_base: str = ""  # what every second node begins as, a folder beside the base's
    specialised: bool = False  # each node asks one task, not the same as its neighbours, far more often than the others

    def config(self, base: Path, lr: float, node: int = 0) -> NodeConfig:
        """A node's settings in this arm. `base` is the model's folder; `node` counts from 0."""
        demo = yaml.safe_load(MIXTURE.read_text())["tasks"]["mixture"]
        mixture = [task for task in demo if task["name"] != LEFT_OUT]
        if self.specialised:
            mixture[node % len(mixture)]["weight"] = PREFERENCE
        return NodeConfig.model_validate(
            {
                "node": {"data_dir": "unused"},
                "tasks": {"mixture": mixture, "eval_questions": 32} | self.tasks,
                "inference": {"max_prompt_tokens": 96, "max_completion_tokens": 16},
                "rollouts": {"completions_per_task": 8, "max_age_seconds": 300} | self.rollouts,
                "swarm": {"name": "bench"},
                # A shortage makes the batch smaller: with own groups in its place arms would differ in completions too.
                "training": {"model": str(base), "lr": lr, "on_shortage": "fewer", "producer_gradients": False}
                | self.training,
            }
        )


def mix(local: int, external: int, **training: Any) -> dict[str, Any]:
    """I and J, and what else an arm sets."""
    return {"local_groups": local, "external_groups": external} | training


DROP = {"external_negative": "drop"}
REFILL = {"local_zero_advantage": "refill"}
COVERAGE = {"rule": "capped", "strategy": "coverage"}
YIELD = {"curriculum": "yield"}
SEQUENCES = {"loss_mean": "sequence"}
KL = {"kl_coef": 0.02}
TWICE = {"max_external_uses": 2}

BALANCED = {"external_balance": "sources"}
BARE = {"answer_form": "bare"}
EXACT = {"answer_form": "exact"}
ANSWERS = {"external_balance": "answers"}
LIKELY = {"external_weighting": "likelihood"}


def wide(external: int = 12, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of `wide`, for `training` and `rollouts`, and what else an arm sets."""
    return mix(4, external, **DROP, **REFILL, **COVERAGE, **more), TWICE


HONEST = 6  # nodes beside two poisoners, and by themselves to compare with


def alone(rule: str) -> str:
    """The name of a rule's arm with the honest nodes alone."""
    return f"{rule}, {HONEST} nodes"


def poisoned(rule: str, kind: Kind) -> str:
    """The name of a rule's arm with poisoners of this kind beside them."""
    return f"{alone(rule)}, 2 poisoners: {kind}"


def _with_poison(rule: str, settings: tuple[dict[str, Any], dict[str, Any]], **tasks: Any) -> Iterator[Arm]:
    yield Arm(alone(rule), *settings, tasks, nodes=HONEST)
    for kind in get_args(Kind):
        yield Arm(poisoned(rule, kind), *settings, tasks, nodes=HONEST, poisoners=2, poison=kind)


ARMS = {
    arm.name: arm
    for arm in (
        Arm("8/0", mix(8, 0)),
        Arm("6/2", mix(6, 2)),
        Arm("4/4", mix(4, 4)),
        Arm("2/6", mix(2, 6)),
        Arm("4/0", mix(4, 0)),
        # Rules.
        Arm("refill", mix(4, 4, **REFILL)),
        Arm("drop+refill", mix(4, 4, **DROP, **REFILL)),
        Arm("drop+refill+coverage", mix(4, 4, **DROP, **REFILL, **COVERAGE)),
        Arm("yield", mix(4, 4), tasks=YIELD),
        # Others' groups cost no sampling, so a batch may hold all that the swarm has of them.
        Arm("4/12", mix(4, 12)),
        Arm("wide", *wide()),
        Arm("wide, sequence mean", *wide(**SEQUENCES)),
        Arm("wide, kl", *wide(**KL)),
        Arm("wide, kl, balanced", *wide(**KL, **BALANCED)),
        Arm("wide, sequence mean, kl", *wide(**SEQUENCES, **KL)),
        # Controls.
        Arm("8/0 resample", mix(8, 0, local_zero_advantage="resample")),
        Arm("8/0 kl", mix(8, 0, **KL)),
        Arm("4/4 kl", mix(4, 4, **KL)),
        Arm("4/4 unfiltered", mix(4, 4, external_zero_advantage="keep")),
        Arm("4/4 own past", mix(4, 4), own_past=True),
        Arm("4/4 own past, again", mix(4, 4), {"max_external_uses": 10}, own_past=True),  # in each of ten rounds
        Arm("4/4 twice the rounds", mix(4, 4), longer=2),
        Arm("4/0 twice the rounds", mix(4, 0), longer=2),
        Arm("8/0 resample kl", mix(8, 0, local_zero_advantage="resample", **KL)),
        # Hostile peers.
        Arm(alone("8/0"), mix(8, 0), nodes=HONEST),
        *_with_poison("wide, kl", wide(**KL)),
        *_with_poison("wide, kl, likely", wide(**KL, **LIKELY)),
        *_with_poison("wide, kl, balanced", wide(**KL, **BALANCED)),
        *_with_poison("wide, kl, balanced, likely", wide(**KL, **BALANCED, **LIKELY)),
        *_with_poison("wide, kl, balanced, half", wide(**KL, **BALANCED, external_weight=0.5)),
        *_with_poison("wide, kl, balanced, J 4", wide(4, **KL, **BALANCED)),
        # Only bare answers are right, wherever they come from.
        Arm(alone("8/0, bare"), mix(8, 0), tasks=BARE, nodes=HONEST),
        *_with_poison("wide, kl, bare", wide(**KL), **BARE),
        *_with_poison("wide, kl, balanced, bare", wide(**KL, **BALANCED), **BARE),
        Arm(alone("8/0, exact"), mix(8, 0), tasks=EXACT, nodes=HONEST),
        *_with_poison("wide, kl, exact", wide(**KL), **EXACT),
        *_with_poison("wide, kl, balanced, exact", wide(**KL, **BALANCED), **EXACT),
        *_with_poison("wide, kl, answers, exact", wide(**KL, **ANSWERS), **EXACT),
        # What else the number and the likeness of nodes do.
        Arm("pooled", mix(64, 0), {"shared_per_round": 0}, nodes=1),  # one policy takes the groups of all eight
        Arm("8/0 specialised", mix(8, 0), specialised=True),
        Arm("4/4 specialised", mix(4, 4), specialised=True),
        Arm("4/4 supervised", mix(4, 4, **DROP), supervised=True),
        Arm("8/0 mixed", mix(8, 0), second_base=SECOND_BASE),
        Arm("4/4 mixed", mix(4, 4), second_base=SECOND_BASE),
        Arm("4/4, 2 nodes", mix(4, 4), nodes=2),
        Arm("4/4, 32 nodes", mix(4, 4), nodes=32),
    )
}
