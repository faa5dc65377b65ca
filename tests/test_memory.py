"""The arithmetic of memory: each part follows its settings, and the whole is what a real trainer takes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sapo_node import memory
from sapo_node.config import NodeConfig
from sapo_node.inference import weights
from sapo_node.memory import GIB, Layout, Needs, Place, gpu_share, needs
from sapo_node.model_shape import ModelShape, read_shape
from sapo_node.training import adapters, logprobs
from tests import train_apart
from tests.tiny import FAMILIES, Family, make_model, make_tokenizer, write_model

HALF_BILLION = ModelShape(
    params=494_000_000,
    layers=24,
    hidden=896,
    heads=14,
    kv_heads=2,
    head_dim=64,
    inner=4864,
    vocabulary=151_936,
    positions=32_768,
)
ALONE = Layout("transformers")
ON_CPU = Layout("vllm", shm_free=64 * GIB)
ON_ONE_GPU = Layout("vllm", trainer_on_gpu=True, engine_on_gpu=True, shared_gpu=True, shm_free=64 * GIB)


def config(**sections: dict[str, Any]) -> NodeConfig:
    return NodeConfig.model_validate(sections)


def size(needed: Needs, name: str, place: Place = "memory") -> int:
    return sum(part.size for part in needed.parts if (part.name, part.place) == (name, place))


def test_constants_are_those_of_the_code() -> None:
    assert memory.CHUNK_LOGITS == logprobs.CHUNK_LOGITS
    assert memory.VERSIONS_AT_ONCE == weights.VERSIONS_AT_ONCE
    assert memory.RESERVE_BYTES == weights.RESERVE_BYTES


def test_sixteen_bytes_a_parameter_in_float32_and_eight_in_bfloat16() -> None:
    for dtype, width in (("float32", 16), ("bfloat16", 8)):
        needed = needs(HALF_BILLION, config(training={"dtype": dtype}), ALONE)
        held = sum(size(needed, name) for name in ("weights", "optimizer", "gradients"))
        assert held == width * HALF_BILLION.params


def test_several_gpus_share_what_is_trained_and_each_holds_all_weights_for_a_moment() -> None:
    one, four = (needs(HALF_BILLION, config(training={"devices": n}), ON_ONE_GPU) for n in (1, 4))
    for name in ("weights", "optimizer", "gradients"):
        assert size(four, name, "gpu") == size(one, name, "gpu") // 4
    assert not size(one, "whole weights", "gpu")
    assert size(four, "whole weights", "gpu") == size(one, "weights", "gpu")
    assert size(four, "CUDA in main memory") == 5 / 2 * size(one, "CUDA in main memory")


def test_ranks_on_a_cpu_share_its_memory() -> None:
    one, two = (needs(HALF_BILLION, config(training={"devices": n}), ALONE) for n in (1, 2))
    assert size(one, "weights") == size(two, "weights")
    assert two.total("memory") > one.total("memory")


def test_a_reference_is_a_second_copy_of_the_weights() -> None:
    assert not size(needs(HALF_BILLION, config(training={"recipe": "paper"}), ALONE), "reference")
    needed = needs(HALF_BILLION, config(training={"kl_coef": 0.1}), ALONE)
    assert size(needed, "reference") == size(needed, "weights")


def test_adapters_alone_have_gradients_and_moments() -> None:
    needed = needs(HALF_BILLION, config(training={"lora_rank": 8, "dtype": "bfloat16", "kl_coef": 0.1}), ALONE)
    held = size(needed, "adapters")
    assert held == 4 * memory.adapter_numbers(HALF_BILLION, 8)
    assert (size(needed, "gradients"), size(needed, "optimizer")) == (held, 2 * held)
    assert held < 0.04 * size(needed, "weights")
    assert not size(needed, "reference"), "it is the policy without its adapters"
    assert size(needed, "weights with adapters") == size(needed, "weights")


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_counted_as_they_are(family: Family, tmp_path: Path) -> None:
    shape = read_shape(write_model(tmp_path, family))
    model = make_model(family)
    adapters.attach(model, 2, None, seed=0)
    exact = sum(tensor.numel() for tensor in adapters.tensors(model).values())
    computed = memory.adapter_numbers(shape, 2)
    assert computed == exact if family == "llama" else exact <= computed <= 1.3 * exact


def test_moments_in_8_bits() -> None:
    needed = needs(HALF_BILLION, config(training={"optimizer": "adamw8bit"}), ON_ONE_GPU)
    assert size(needed, "optimizer", "gpu") == 2 * HALF_BILLION.params


def test_moments_have_the_type_of_their_parameters() -> None:
    parameter = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16


def test_checkpointed_layers_keep_little_more_than_their_inputs() -> None:
    kept, whole = (
        size(needs(HALF_BILLION, config(training={"gradient_checkpointing": on}), ALONE), "activations")
        for on in (True, False)
    )
    assert 0.1 * whole < kept < 0.3 * whole  # 24 layers: an input each, and three layers' worth of the rest


def test_phases_do_not_add_up() -> None:
    needed = needs(HALF_BILLION, config(), ALONE)
    always = sum(part.size for part in needed.parts if part.phase == "always")
    sizes = [sum(p.size for p in needed.parts if p.phase == phase) for phase in ("training", "prompts", "sampling")]
    assert needed.total("memory") == always + max(sizes)
    assert needed.peak("memory") == "training"


def test_what_is_always_there_is_no_phase() -> None:
    tiny = replace(HALF_BILLION, params=1000, layers=1, hidden=8, inner=8, vocabulary=10)
    needed = needs(tiny, config(inference={"batch_completions": 1}), ALONE)
    assert needed.peak("memory") != "always"


def test_the_cache_of_the_transformers_engine() -> None:
    settings = config(inference={"batch_completions": 10, "max_prompt_tokens": 70, "max_completion_tokens": 30})
    one_layer_twice = 25 / 24
    exact = 10 * 100 * 24 * 2 * 2 * 64 * 4
    assert size(needs(HALF_BILLION, settings, ALONE), "key-value cache") == pytest.approx(exact * one_layer_twice)


def test_positions_bound_the_cache() -> None:
    short = replace(HALF_BILLION, positions=64)
    settings = config(inference={"batch_completions": 10})
    kv = size(needs(short, settings, ALONE), "key-value cache")
    padded = 63 + 63  # beside a long prompt, a short one's completion begins where that ends
    assert kv == pytest.approx(10 * padded * short.kv_numbers * 4 * 25 / 24)


def test_longer_completions_need_a_larger_cache_and_longer_passes() -> None:
    short, long = (
        needs(HALF_BILLION, config(inference={"max_completion_tokens": tokens}), ALONE) for tokens in (256, 32_000)
    )
    rows = 256 * (32_000 - 256)
    cache = size(long, "key-value cache") - size(short, "key-value cache")
    assert cache == pytest.approx(rows * HALF_BILLION.kv_numbers * 4 * 25 / 24)
    assert size(long, "activations") > size(short, "activations")
    assert long.total("memory") > short.total("memory")


def test_a_model_split_on_a_cpu_has_a_cache_and_a_process_a_part() -> None:
    one, two = (needs(HALF_BILLION, config(inference={"tensor_parallel": parts}), ON_CPU) for parts in (1, 2))
    assert size(two, "vLLM: key-value cache") == 2 * size(one, "vLLM: key-value cache")
    assert size(two, "vLLM's processes") > size(one, "vLLM's processes")


def test_a_whole_completion_must_fit_into_a_pass() -> None:
    settings = config(
        training={"micro_batch_tokens": 1}, inference={"max_prompt_tokens": 100, "max_completion_tokens": 50}
    )
    assert memory.training_tokens(settings, HALF_BILLION) == 150


def test_a_node_alone_is_bounded_by_its_own_round() -> None:
    settings = config(
        swarm={"enabled": False},
        training={"local_groups": 2},
        rollouts={"completions_per_task": 4},
        inference={"max_prompt_tokens": 100, "max_completion_tokens": 50},
    )
    assert memory.training_tokens(settings, HALF_BILLION) == 2 * (100 + 4 * 50)


def test_vllm_on_a_cpu_holds_weights_cache_and_the_files_between() -> None:
    needed = needs(HALF_BILLION, config(inference={"kv_cache_gib": 2.5}), ON_CPU)
    assert size(needed, "vLLM: key-value cache") == int(2.5 * GIB)
    assert size(needed, "weights in files") == 2 * 4 * HALF_BILLION.params
    assert not size(needed, "key-value cache"), "the trainer does not sample"


def test_weights_in_a_folder_or_a_small_shm_cost_no_memory(tmp_path: Path) -> None:
    small = needs(HALF_BILLION, config(), ON_CPU._replace(shm_free=64 << 20))
    elsewhere = needs(HALF_BILLION, config(inference={"weights_dir": str(tmp_path)}), ON_CPU)
    assert not size(small, "weights in files")
    assert not size(elsewhere, "weights in files")


def test_producer_gradients_cost_two_more_copies() -> None:
    plain, measured = (needs(HALF_BILLION, config(training={"producer_gradients": on}), ALONE) for on in (False, True))
    assert size(measured, "gradients") == 3 * size(plain, "gradients")


def test_a_soft_cap_holds_all_logits() -> None:
    capped = needs(replace(HALF_BILLION, changes_logits=True), config(), ALONE)
    assert size(capped, "output layer") > 10 * size(needs(HALF_BILLION, config(), ALONE), "output layer")


def test_the_share_leaves_the_trainer_its_peak() -> None:
    settings = config(training={"micro_batch_tokens": 2048})
    needed = needs(HALF_BILLION, settings, ON_ONE_GPU)
    trains = sum(part.size for part in needed.at_peak("gpu") if not part.name.startswith("vLLM"))
    share, least = gpu_share(HALF_BILLION, settings, ON_ONE_GPU, total=40 * GIB, free=39 * GIB)
    assert share * 40 * GIB + trains + 0.05 * 40 * GIB <= 39 * GIB
    assert (share + 0.002) * 40 * GIB + trains + 0.05 * 40 * GIB > 39 * GIB, "nor does it waste any"
    assert least * 40 * GIB >= 4 * HALF_BILLION.params + memory.least_kv_bytes(HALF_BILLION, settings)
    assert share > least


def test_a_gpu_of_its_own_is_vllms() -> None:
    apart = ON_ONE_GPU._replace(shared_gpu=False)
    assert gpu_share(HALF_BILLION, config(), apart, total=40 * GIB, free=40 * GIB)[0] == memory.MOST_OF_A_GPU


def measured_peak(folder: Path, settings: dict[str, Any]) -> int:
    """What the trainer takes at its peak, in a process of its own."""
    command = [sys.executable, train_apart.__file__, str(folder), json.dumps(settings)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env={"PYTHONPATH": str(root)})
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("training", [{}, {"lora_rank": 8}, {"kl_coef": 0.1}], ids=["all", "adapters", "reference"])
def test_a_real_trainer_takes_what_was_computed(tmp_path: Path, training: dict[str, Any]) -> None:
    shape = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        vocab_size=16_000,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    settings = {
        "training": {"micro_batch_tokens": 1024, **training},
        "inference": {"max_prompt_tokens": 16, "max_completion_tokens": 32, "batch_completions": 8},
    }
    trains = [
        part
        for part in needs(read_shape(tmp_path), config(**settings), ALONE).at_peak("memory")
        if part.name != "the program"
    ]
    predicted = memory.POLICY_BYTES + sum(part.size for part in trains)
    measured = measured_peak(tmp_path, settings)
    assert measured <= 1.1 * predicted, f"{measured >> 20} MiB, computed {predicted >> 20}"
    assert measured >= 0.6 * predicted, f"{measured >> 20} MiB, computed {predicted >> 20}"
