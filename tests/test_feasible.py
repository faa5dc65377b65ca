"""What cannot work is refused by name before anything is loaded."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sapo_node.config import NodeConfig
from sapo_node.errors import ConfigError
from sapo_node.fit import check, check_model
from sapo_node.machine import Machine
from sapo_node.model_shape import ModelShape
from tests.test_fit import config, made
from tests.test_memory import HALF_BILLION

VLLM = {"engine": "vllm"}


def refusal(settings: NodeConfig, machine: Machine, shape: ModelShape | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check(shape, settings, machine) if shape else check_model(settings, machine)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"training": {"device": "cuda"}}, "training.device is cuda, but there is no GPU here"),
        ({"training": {"optimizer": "adamw8bit"}}, "training.optimizer is adamw8bit, which is for GPUs"),
        ({"inference": {**VLLM, "weight_transfer": "ipc"}}, "inference.weight_transfer is ipc, which is for GPUs"),
        ({"inference": {**VLLM, "weight_transfer": "nccl"}}, "inference.weight_transfer is nccl, which is for GPUs"),
        ({"inference": {**VLLM, "gpu_memory_share": 0.5}}, "inference.gpu_memory_share is set, but vLLM runs on a CPU"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(sections: dict[str, Any], told: str) -> None:
    assert told in refusal(config(**sections), made(100))
    check_model(config(**sections), made(100, vllm="vllm", gpus=(80, 80)))


def test_more_devices_than_gpus() -> None:
    settings = config(training={"devices": 3})
    assert "training.devices is 3, but there are 2 GPU(s) here" in refusal(settings, made(100, gpus=(80, 80)))
    check_model(settings, made(100, gpus=(80, 80, 80)))


def test_a_build_of_torch_without_cuda_is_told_apart() -> None:
    machine = replace(made(100, gpus=(80,)), torch_sees_gpus=False)
    assert "torch is a build without CUDA here" in refusal(config(training={"device": "cuda"}), machine)


def test_where_gpus_could_not_be_looked_for_torch_decides() -> None:
    unsure = replace(made(100), notes=("nvidia-smi did not answer within 15 s: GPUs are not seen",))
    check_model(config(training={"device": "cuda"}), unsure)


def test_everything_is_named_at_once() -> None:
    settings = config(training={"device": "cuda"}, inference={**VLLM, "weight_transfer": "ipc"})
    text = refusal(settings, made(100))
    assert "training.device" in text
    assert "inference.weight_transfer" in text


def test_a_folder_for_weights_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = config(inference={**VLLM, "weights_dir": str(tmp_path / "file" / "sub")})
    assert f"inference.weights_dir: {tmp_path}/file/sub cannot be used: {tmp_path}/file: Not a directory" in refusal(
        settings, made(100)
    )
    settings = config(inference={**VLLM, "weights_dir": str(tmp_path / "new" / "sub")})
    check_model(settings, made(100))
    assert [file.name for file in tmp_path.iterdir()] == ["file"], "nothing is left of the trial"


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that not even root may write to")
def test_a_folder_for_weights_where_nothing_can_be_written() -> None:
    settings = config(inference={**VLLM, "weights_dir": "/proc/sub"})
    assert "inference.weights_dir: /proc/sub cannot be used: /proc: " in refusal(settings, made(100))


@pytest.mark.parametrize("parts", [3, 4, 8])
def test_a_model_that_cannot_be_split_so(parts: int) -> None:
    text = refusal(config(inference={**VLLM, "tensor_parallel": parts}), made(100), HALF_BILLION)
    assert f"inference.tensor_parallel is {parts}" in text
    assert text.endswith("possible: 1, 2")


def test_heads_of_keys_and_values_may_be_copied() -> None:
    shape = replace(HALF_BILLION, heads=16, kv_heads=2)
    check(shape, config(inference={**VLLM, "tensor_parallel": 8}), made(100))


def test_a_completion_longer_than_the_model_knows() -> None:
    short = replace(HALF_BILLION, positions=512)
    text = refusal(config(inference={"max_completion_tokens": 100_000}), made(100), short)
    assert "inference.max_completion_tokens is 100000" in text
    assert "positions for 512 tokens" in text


def test_completions_that_long_prompts_cut_are_remarked_on() -> None:
    short = replace(HALF_BILLION, positions=512)
    (remark,) = check(short, config(), made(100)).remarks
    assert "behind prompts of more than 256 tokens" in remark
    assert check(HALF_BILLION, config(), made(100)).remarks == ()


def test_settings_that_only_vllm_knows_are_remarked_on() -> None:
    (remark,) = check(HALF_BILLION, config(inference={"weight_transfer": "nccl"}), made(100)).remarks
    assert remark.endswith("no effect: inference.weight_transfer")
