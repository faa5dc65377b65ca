"""What the owner should hear about the licence of the model, before its answers travel."""

from sapo_node.config import NodeConfig
from sapo_node.model_shape import EMBEDDED


def note(config: NodeConfig) -> str | None:
    """A sentence where others could not tell whether they may train on this model's answers, else None."""
    training, unknown = config.training, config.training.licence.strip().lower() in ("", "unknown")
    if not (unknown and config.swarm.enabled) or training.model in EMBEDDED:
        return None
    return (
        f"training.licence does not name that of {training.model}: look up whether others may train on its answers, "
        "and name it there. Nodes that choose by licence (swarm.accept_licences) leave out what does not name one."
    )
