"""The policy worker as a real process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from sapo_node.inference.base import SamplingParams
from sapo_node.inference.transformers import TransformersEngine
from sapo_node.training import checkpoint
from sapo_node.training.base import LoadRequest, TrainCompletion, TrainGroup
from sapo_node.training.remote import RemoteTrainer
from sapo_node.workers import CallFailed, Refused, Worker
from tests.tiny import write_model
from tests.training.support import drive


def request(model: Path | str, **others: Any) -> LoadRequest:
    return LoadRequest(
        training={"model": str(model)}, inference={"max_completion_tokens": 8}, seed=1, threads=1, **others
    )


@pytest.mark.slow
def test_load_sample_step_save_resume(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", template=None)

    async def scenario(worker: Worker) -> None:
        trainer, engine = RemoteTrainer(worker), TransformersEngine(worker)
        info = await trainer.load(request(model))
        assert (info.lr, info.device, info.policy_version) == (3e-4, "cpu", 0)
        assert len(info.tokenizer_sha256) == 32
        assert any("no chat template" in note for note in info.notes)

        batch = await engine.sample(["what is 1 + 1?"], SamplingParams(n=4, max_tokens=6))
        completions = [
            TrainCompletion(text=c.text, finish=c.finish, token_ids=c.token_ids, logprobs=c.logprobs)
            for c in batch.groups[0]
        ]
        group = TrainGroup(
            group_id=1,
            origin="local",
            producer="me",
            question="what is 1 + 1?",
            completions=completions,
            rewards=[1.0, 0.0, 0.0, 1.0],
            policy_version=batch.policy_version,
        )
        long = structs.replace(group, group_id=2, question="1 + " * 5000)
        assert list(await trainer.unfit([long])) == [2]
        result = await trainer.step([group])
        assert result.policy_version == 1
        assert result.skipped == {}

        texts = await trainer.score_texts()
        assert texts.tokens > 64
        assert texts.mean_logprob < 0.0

        saved = await trainer.save(tmp_path / "checkpoints", {"seq": 5})
        newest = checkpoint.latest(tmp_path / "checkpoints")
        assert newest == Path(saved.path)
        assert checkpoint.read_state(newest).extra == {"seq": 5}

        params = SamplingParams(n=4, max_tokens=6)
        expected = await engine.sample(["what is 1 + 1?"], params)
        assert (await trainer.load(request(model, resume=str(newest)))).policy_version == 1
        assert (await engine.sample(["what is 1 + 1?"], params)).groups == expected.groups

        (tmp_path / "file").write_text("in the way")
        with pytest.raises(CallFailed, match="file"):
            await trainer.save(tmp_path / "file", {})

    drive(scenario)


@pytest.mark.slow
def test_refusals_reach_the_node_as_sentences(tmp_path: Path) -> None:
    async def scenario(worker: Worker) -> None:
        trainer = RemoteTrainer(worker)
        with pytest.raises(Refused, match="no model is loaded yet"):
            await trainer.step([])
        with pytest.raises(Refused, match="does not exist"):
            await trainer.load(request(tmp_path / "nowhere"))
        with pytest.raises(Refused, match="is no checkpoint"):
            await trainer.load(request(write_model(tmp_path / "model"), resume=str(tmp_path)))

    drive(scenario)


def test_the_nodes_side_imports_no_torch() -> None:
    code = (
        "import sys; import sapo_node.training.remote, sapo_node.inference.transformers, sapo_node.training.checkpoint,"
        " sapo_node.training.export; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
