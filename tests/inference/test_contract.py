"""What every engine promises (`inference/base.py`), asked of each of them through the policy that a node has."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from sapo_node.inference.base import SampledBatch, SamplingParams
from sapo_node.inference.paired import PairedPolicy
from sapo_node.training.base import ShareRequest, TrainCompletion, TrainGroup
from sapo_node.training.policy import Policy as Loaded
from sapo_node.training.policy import load_policy
from sapo_node.training.supervised import Policy, PolicyLost
from sapo_node.workers import CallFailed
from tests.inference.support import CLOSE, QUESTIONS, SHORT, Loop, errors, needs_vllm, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOO_LONG = "and " * 200
LONG = SamplingParams(n=64, max_tokens=200)


class Subject:
    """One engine under test, with the loop that it lives in."""

    def __init__(self, policy: Policy, folder: Path, loop: Loop) -> None:
        self.policy, self.folder, self.loop = policy, folder, loop
        self._exported = 0

    def sample(self, questions: list[str] = QUESTIONS, params: SamplingParams = SHORT) -> SampledBatch:
        return self.loop.run(self.policy.sample(questions, params))

    def weights(self) -> Loaded:
        """The trainer's weights as they are now, loaded in this process."""
        self._exported += 1
        folder = self.folder / f"export-{self._exported}"
        folder.mkdir()
        shared = self.loop.run(self.policy.share(ShareRequest(directory=str(folder), whole=True)))
        assert shared.path is not None
        return load_policy("exported", folder=Path(shared.path))

    def step(self) -> None:
        """One optimiser step that changes the weights; returns when completions are sampled by the new ones."""
        batch = self.sample(params=SamplingParams(n=8, max_tokens=100))

        async def scenario() -> None:
            await self.policy.step([train_group(batch, index) for index in range(len(QUESTIONS))])
            await self.policy.settled()

        self.loop.run(scenario())


def train_group(batch: SampledBatch, index: int) -> TrainGroup:
    group = batch.groups[index]
    completions = [
        TrainCompletion(text=one.text, finish=one.finish, token_ids=one.token_ids, logprobs=one.logprobs)
        for one in group
    ]
    return TrainGroup(
        group_id=index,
        origin="local",
        producer="me",
        question=QUESTIONS[index],
        completions=completions,
        rewards=[float(position % 2) for position in range(len(group))],
        policy_version=batch.policy_version,
    )


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=needs_vllm)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder, loop = tmp_path_factory.mktemp(request.param), Loop()
    kind = PairedPolicy if request.param == "vllm" else Policy
    policy = kind(settings(folder / "data", inference={"engine": request.param}), None)
    try:
        loop.run(policy.start(), 250)
        yield Subject(policy, folder, loop)
    finally:
        loop.run(policy.close(1))
        loop.close()


def test_groups_have_the_questions_order_and_n_completions_each(subject: Subject) -> None:
    groups = subject.sample().groups
    assert [len(group) for group in groups] == [SHORT.n] * len(QUESTIONS)
    weights = subject.weights()
    assert errors(weights, QUESTIONS, groups).max() < CLOSE
    assert errors(weights, QUESTIONS[::-1], groups).max() > 10 * CLOSE  # so another order would have been seen


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_are_those_of_the_distribution_that_was_drawn_from(
    subject: Subject, temperature: float
) -> None:
    params = SamplingParams(n=16, max_tokens=40, temperature=temperature)
    groups = subject.sample(params=params).groups
    assert errors(subject.weights(), QUESTIONS, groups, temperature).max() < CLOSE


def test_only_a_completion_that_stopped_ends_with_the_end_token(subject: Subject) -> None:
    completions = [one for group in subject.sample(params=SamplingParams(n=32, max_tokens=5)).groups for one in group]
    ends = set(subject.policy.info.stop_ids)  # type: ignore[union-attr]
    for one in completions:
        *before, last = one.token_ids
        assert not ends & set(before)
        assert (last in ends) == (one.finish == "stop")
    assert {one.finish for one in completions} == {"stop", "length"}


def test_every_token_has_a_logprob_and_no_completion_is_longer_than_asked(subject: Subject) -> None:
    for group in subject.sample(params=SamplingParams(n=32, max_tokens=5)).groups:
        for one in group:
            assert len(one.logprobs) == len(one.token_ids) <= 5
            assert len(one.token_ids) == 5 or one.finish == "stop"
            assert all(logprob <= 0 for logprob in one.logprobs)


def test_a_prompt_that_is_too_long_gets_an_empty_group_in_its_place(subject: Subject) -> None:
    groups = subject.sample([QUESTIONS[0], TOO_LONG, QUESTIONS[1]]).groups
    assert [len(group) for group in groups] == [SHORT.n, 0, SHORT.n]
    assert errors(subject.weights(), [QUESTIONS[0], TOO_LONG, QUESTIONS[1]], groups).max() < CLOSE
    assert subject.sample([TOO_LONG]).groups == [[]]


def test_the_text_is_what_the_tokens_spell_without_control_tokens(subject: Subject) -> None:
    weights = subject.weights()
    ended = 0
    for group in subject.sample(params=SamplingParams(n=16, max_tokens=30)).groups:
        for one in group:
            stopped = one.finish == "stop"
            assert one.text == weights.encoder.decode([one.token_ids[:-1] if stopped else one.token_ids])[0]
            assert not any(token in one.text for token in weights.tokenizer.all_special_tokens)
            ended += stopped
    assert ended


def test_the_same_seed_gives_the_same_completions(subject: Subject) -> None:
    first, same, other = (
        subject.sample(params=SamplingParams(n=4, max_tokens=12, seed=seed)).groups for seed in (3, 3, 4)
    )
    tokens = [[[one.token_ids for one in group] for group in groups] for groups in (first, same, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert len({tuple(one.token_ids) for one in first[0]}) > 1  # the completions of one group differ


def test_after_a_step_completions_are_sampled_by_the_new_weights_and_say_so(subject: Subject) -> None:
    before, old = subject.policy.version, subject.weights()
    subject.step()
    assert subject.policy.version == before + 1
    batch = subject.sample(params=SamplingParams(n=8, max_tokens=40))
    assert batch.policy_version == before + 1
    assert {tuple(one.policy_versions) for group in batch.groups for one in group} == {(before + 1,)}
    assert errors(subject.weights(), QUESTIONS, batch.groups).max() < CLOSE
    assert errors(old, QUESTIONS, batch.groups).mean() > 10 * CLOSE  # the step did change them


def test_several_steps_leave_no_difference_behind(subject: Subject) -> None:
    for _ in range(3):
        subject.step()
    assert errors(subject.weights(), QUESTIONS, subject.sample().groups).max() < CLOSE


def test_calls_side_by_side_all_come_back_with_their_own_answers(subject: Subject) -> None:
    async def scenario() -> list[SampledBatch]:
        return await asyncio.gather(*(subject.policy.sample([question], SHORT) for question in QUESTIONS))

    batches, weights = subject.loop.run(scenario()), subject.weights()
    for question, batch in zip(QUESTIONS, batches, strict=True):
        assert [len(group) for group in batch.groups] == [SHORT.n]
        assert errors(weights, [question], batch.groups).max() < CLOSE


def test_an_interrupt_ends_what_is_sampled_and_the_next_call_is_answered(subject: Subject) -> None:
    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        call = asyncio.create_task(subject.policy.sample(QUESTIONS * 40, LONG))
        await asyncio.sleep(1.0)
        assert not call.done()
        began = loop.time()
        subject.policy.interrupt()
        with pytest.raises((PolicyLost, CallFailed), match="nterrupted"):
            await call
        return loop.time() - began

    assert subject.loop.run(scenario()) < 5
    assert errors(subject.weights(), QUESTIONS, subject.sample().groups).max() < CLOSE
    assert subject.policy.restarts == subject.policy.engine.restarts == 0


def test_interrupting_an_engine_that_waits_changes_nothing(subject: Subject) -> None:
    async def scenario() -> None:
        subject.policy.interrupt()
        await asyncio.sleep(0.5)

    subject.loop.run(scenario())
    assert errors(subject.weights(), QUESTIONS, subject.sample().groups).max() < CLOSE
