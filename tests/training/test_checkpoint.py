import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sapo_node.training import checkpoint
from sapo_node.training.checkpoint import CheckpointError, State
from sapo_node.training.export import export
from tests.tiny import make_model, make_tokenizer


def write(directory: Path, version: int, keep: int = 2, text: str = "weights") -> Path:
    state = State(policy_version=version, model="demo", extra={"groups": version, "nested": {"a": [1, 2.5, None]}})
    return checkpoint.write(directory, state, lambda folder: (folder / "model").write_text(text) and None, keep)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, 123)
    assert path.name == "step-000123"
    state = checkpoint.read_state(path)
    assert (state.policy_version, state.model) == (123, "demo")
    assert state.extra == {"groups": 123, "nested": {"a": [1, 2.5, None]}}


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nothing") is None
    for version in (9, 1_000_000, 10):
        write(tmp_path, version, keep=9)
    (tmp_path / "step-2000000").mkdir()  # without state.json: not whole
    (tmp_path / ".tmp-step-3000000").mkdir()
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-1000000"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for version in range(1, 6):
        write(tmp_path, version, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000005"]


def test_a_failed_write_leaves_the_old_ones_alone(tmp_path: Path) -> None:
    write(tmp_path, 1)

    def full(folder: Path) -> None:
        (folder / "model").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(tmp_path, State(policy_version=2, model="demo", extra={}), full, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_one_that_cannot_be_put_in_place_leaves_the_one_of_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1, text="old")
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name == ".tmp-step-000001":
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input/output"):
        write(tmp_path, 1, text="new")
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert (tmp_path / "step-000001" / "model").read_text() == "old"


def test_what_a_crash_left_is_removed_by_the_next_write(tmp_path: Path) -> None:
    (tmp_path / ".tmp-step-000001").mkdir()
    (tmp_path / ".tmp-step-000001" / "half").write_text("x")
    write(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_the_same_step_can_be_written_again(tmp_path: Path) -> None:
    write(tmp_path, 3, text="old")
    assert (write(tmp_path, 3, text="new") / "model").read_text() == "new"


def test_files_and_folders_are_flushed_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def spy_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def spy_rename(self: Path, target: Path) -> Path:
        events.append(f"-> {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "rename", spy_rename)
    write(tmp_path, 1)
    assert set(events[:2]) == {"model", "state.json"}
    assert events[2:] == [".tmp-step-000001", "-> step-000001", tmp_path.name]


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({"format": state["format"] + 1, "unknown": True}))
    with pytest.raises(CheckpointError, match="newer sapo-node"):
        checkpoint.read_state(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "x"}', '{"format": 1}', "{"])
def test_a_damaged_state_is_told(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, 1)
    (path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.read_state(path)


def test_an_export_loads_without_us(tmp_path: Path) -> None:
    model, tokenizer = make_model(), make_tokenizer()

    def fill(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "trainer.safetensors").write_bytes(b"moments")

    path = checkpoint.write(tmp_path, State(policy_version=1, model="demo", extra={"secret": 1}), fill, 1)
    export(path, tmp_path / "out")
    assert not {"state.json", "trainer.safetensors"} & {file.name for file in (tmp_path / "out").iterdir()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "out")("what is 12")["input_ids"]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "checkpoints", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(CheckpointError, match="exists already"):
        export(path, tmp_path / "out")


def test_no_checkpoint_no_export(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        export(tmp_path, tmp_path / "out")
