import json
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from sapo_node.inference.sampling import check_sampling
from sapo_node.training.policy import (
    BFLOAT16_SLOWDOWN,
    bfloat16_slowdown,
    check_folder,
    checkpoint_layers,
    default_lr,
    load_policy,
    make_policy,
    public_name,
    refuse_slow_bfloat16,
)
from sapo_node.workers import Refused
from tests.tiny import FAMILIES, Family, make_model, make_tokenizer, write_model


@pytest.mark.parametrize("family", FAMILIES)
def test_model_folders_of_three_families_load(tmp_path: Path, family: Family) -> None:
    policy = load_policy(str(write_model(tmp_path / "model", family)))
    assert policy.packed
    assert policy.split_head
    assert policy.stop_ids == (0,)
    assert policy.notes == []


def test_the_tokenizers_digest_does_not_depend_on_where_it_lies(tmp_path: Path) -> None:
    write_model(tmp_path / "one")
    write_model(tmp_path / "two", "gpt2")
    digests = {load_policy(str(tmp_path / name)).tokenizer_sha256 for name in ("one", "two")}
    assert len(digests) == 1


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no-such-model does not exist"):
        load_policy(str(tmp_path / "no-such-model"))


def test_a_hub_name_without_network_says_how_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Refused, match="copy the model's folder to this machine"):
        load_policy("nobody/no-such-model")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"has no config\.json"):
        check_folder(tmp_path)


def test_a_model_that_is_no_causal_lm_is_refused_by_its_class(tmp_path: Path) -> None:
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=40)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(Refused, match="BertForMaskedLM, not a causal language model"):
        load_policy(str(tmp_path))


def test_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(Refused, match="pickled weights"):
        load_policy(str(tmp_path))


def test_code_in_a_models_folder_is_not_run(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["OurOwnModel"], "model_type": "ours", "auto_map": {"AutoConfig": "code.OurConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(Refused, match="OurOwnModel, not a causal language model"):
        load_policy(str(tmp_path))


NO_MODELS = {
    "nested too deeply": b"[" * 100_000,
    "a list": b"[]",
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "odd classes": b'{"architectures": 5}',
    "an odd class": b'{"architectures": [["LlamaForCausalLM"]]}',
    "an odd kind": b'{"model_type": ["llama"]}',
    "a class that would be shown": b'{"architectures": ["\\u001b[31mOurs"]}',
}


@pytest.mark.parametrize("config", NO_MODELS.values(), ids=NO_MODELS)
def test_a_config_of_no_model_is_refused_in_a_sentence(tmp_path: Path, config: bytes) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(Refused, match=r"^training\.model: ") as caught:
        load_policy(str(tmp_path))
    assert "\x1b" not in str(caught.value)


def test_adapters_beside_a_model_are_refused_unread(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "owner/other"}')
    with pytest.raises(Refused, match=r"holds adapter_config\.json"):
        load_policy(str(tmp_path))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(Refused, match="has no tokenizer"):
        load_policy(str(tmp_path))


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0not a header....")
    with pytest.raises(Refused, match="cannot be loaded"):
        load_policy(str(tmp_path))


def test_missing_weights_are_not_filled_with_noise(tmp_path: Path) -> None:
    write_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_hidden_layers"] = 3  # one more than there are weights for
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match=r"lacks \d+ weights"):
        load_policy(str(tmp_path))


def test_a_tokenizer_larger_than_its_model_is_refused() -> None:
    with pytest.raises(Refused, match="do not belong together"):
        make_policy("small", make_model(vocabulary=100), make_tokenizer())


def test_a_tokenizer_without_an_end_is_refused() -> None:
    tokenizer, model = make_tokenizer(), make_model()
    tokenizer.eos_token = None
    model.generation_config.eos_token_id = None
    with pytest.raises(Refused, match="no end-of-sequence token"):
        make_policy("endless", model, tokenizer)


def test_a_cuda_device_that_is_missing_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(Refused, match="finds no CUDA device"):
        load_policy(str(write_model(tmp_path)), device="cuda")


class Blind(LlamaForCausalLM):
    """A model that does not tell its attention of groups, as architectures with their own attention do."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, **others):  # type: ignore[no-untyped-def]
        return super().forward(input_ids, position_ids=position_ids, **others)


class Capped(GPT2LMHeadModel):
    """A model that does more to its logits than its output layer."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, **others):  # type: ignore[no-untyped-def]
        output = super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **others)
        output.logits = 3 * torch.tanh(output.logits / 3)
        return output


def test_logits_changed_behind_the_output_layer_are_noticed() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.3)
    policy = make_policy("capped", Capped(config).eval(), make_tokenizer())
    assert not policy.split_head
    assert policy.packed
    assert any("behind the output layer" in note for note in policy.notes)


def test_a_model_that_ignores_groups_is_trained_on_unpacked() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    model = Blind(config).eval()
    model.base_model.forward = _without_mask(model.base_model.forward)
    policy = make_policy("blind", model, make_tokenizer())
    assert not policy.packed
    assert any("knows no groups" in note for note in policy.notes)


def _without_mask(forward):  # type: ignore[no-untyped-def]
    return lambda *arguments, attention_mask=None, packed_groups=None, **others: forward(*arguments, **others)


def test_a_sliding_window_is_not_packed() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=64,
        max_position_embeddings=256,
    )
    assert not make_policy("window", MistralForCausalLM(config).eval(), make_tokenizer()).packed


def test_bfloat16_is_allowed_with_a_warning(tmp_path: Path) -> None:
    policy = load_policy(str(write_model(tmp_path, scale=0.05)), device="cpu", dtype="bfloat16")
    assert policy.packed
    assert any("round away small updates" in note for note in policy.notes)


@pytest.mark.parametrize("slowdown", [BFLOAT16_SLOWDOWN, 31.4])
def test_slow_bfloat16_is_refused_with_what_was_measured(monkeypatch: pytest.MonkeyPatch, slowdown: float) -> None:
    monkeypatch.setattr("sapo_node.training.policy.bfloat16_slowdown", lambda device: slowdown)  # hardware differs
    with pytest.raises(Refused, match=f"takes {slowdown:.0f} times as long as float32 on this cpu"):
        refuse_slow_bfloat16(torch.device("cpu"))


def test_fast_bfloat16_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sapo_node.training.policy.bfloat16_slowdown", lambda device: 1.2)
    refuse_slow_bfloat16(torch.device("cpu"))


def test_the_speed_of_bfloat16_is_measured() -> None:
    assert bfloat16_slowdown(torch.device("cpu")) > 0


def test_a_model_without_layers_to_checkpoint_is_refused() -> None:
    policy = make_policy("plain", make_model(), make_tokenizer())
    policy.model.supports_gradient_checkpointing = False
    with pytest.raises(Refused, match="LlamaForCausalLM does not support it"):
        checkpoint_layers(policy)


@pytest.mark.parametrize("name", ["demo", "benchmark"])
def test_the_embedded_models_take_every_fast_path(name: str) -> None:
    policy = load_policy(name)
    assert (policy.packed, policy.split_head, policy.notes) == (True, True, [])
    check_sampling(policy)


def test_a_chat_template_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(Refused, match="chat template of odd cannot be used"):
        make_policy("odd", make_model(), make_tokenizer("{{ raise_exception('never') }}"))


def test_a_name_that_is_nothing_lists_what_it_could_be() -> None:
    with pytest.raises(Refused, match=r"no embedded model \(demo, benchmark\), no folder here"):
        load_policy("dmeo")


def test_others_are_not_told_paths(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert public_name(str(tmp_path / "mine")) == "mine"
    assert public_name("org/model") == "org/model"


def test_learning_rates_follow_the_model() -> None:
    assert (default_lr(500_000), default_lr(10_000_000), default_lr(135_000_000)) == (3e-4, 3e-4, 1e-6)
