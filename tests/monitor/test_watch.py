"""What a node's alarms see, and what follows from them."""

import asyncio
import json
from typing import Any

import pytest

from sapo_node.config import NodeConfig, TrainingSection
from sapo_node.monitor import alarms, watch
from sapo_node.monitor.alarms import Fallen, Sender, Strayed
from sapo_node.monitor.metrics import RoundRecord
from sapo_node.monitor.status import NodeStatus
from sapo_node.monitor.watch import Unwatched, Watch
from sapo_node.rollouts.pool import NewGroup
from sapo_node.rollouts.schema import TaskRef
from sapo_node.tasks import mixture
from sapo_node.tasks.base import answer_digest
from sapo_node.training.base import TextScore, TrainCompletion
from sapo_node.training.supervised import PolicyLost


class ToyPolicy:
    """Says what the fixed texts are worth to it; `None`: it was lost."""

    def __init__(self, logprob: float | None = -3.0) -> None:
        self.logprob = logprob
        self.asked = 0

    async def score_texts(self) -> TextScore:
        self.asked += 1
        if self.logprob is None:
            raise PolicyLost("it is gone")
        return TextScore(mean_logprob=self.logprob, chance=-10.0, tokens=100)


def group(index: int, texts: list[str], rewards: list[float], truth: str = "7", logprob: float = -0.5) -> NewGroup:
    ref = TaskRef(
        source="reasoning_gym", version="1", name="gcd", config_hash=bytes(32), config={}, epoch=1, index=index
    )
    return NewGroup(
        task=ref,
        question=f"question {index}",
        question_sha256=index.to_bytes(32, "big"),
        completions=[
            TrainCompletion(text=text, finish="stop", token_ids=[1, 2], logprobs=[logprob, logprob]) for text in texts
        ],
        rewards=rewards,
        sampled_at=1.0,
        policy_version=0,
        truth=answer_digest(truth),
    )


def sender(network: str) -> Sender:
    return Sender(f"key in {network}", network, network)


def close(one: Watch, round: int = 1, policy: ToyPolicy | None = None) -> RoundRecord:
    record = RoundRecord(round=round, time=1.0, policy_version=round)
    return asyncio.run(one.close(record, policy or ToyPolicy()))


def test_a_round_gets_its_numbers_from_its_own_groups() -> None:
    one = Watch()
    one.own([group(0, ["7", "8"], [1.0, 0.0]), group(1, ["8", "9"], [0.0, 0.0], logprob=-1.5)])
    record = close(one)
    assert record.any_right == 0.5
    assert record.entropy_sampled == pytest.approx(1.0)
    assert record.repeated == 0.25  # "8" came before
    assert close(one, 2).any_right is None  # nothing was sampled since
    assert NodeStatus(pid=1, state="training", started_at=0.0, updated_at=0.0, **one.status()).any_right == 0.5


def test_groups_of_others_say_nothing_about_the_policy() -> None:
    one = Watch()
    one.external([group(0, ["7", "8"], [1.0, 0.0])], sender("net"))
    assert close(one).any_right is None


def test_remembered_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "REMEMBERED_TEXTS", 2)
    one = Watch()
    one.own([group(0, ["a", "b"], [0.0, 0.0]), group(1, ["c", "d"], [0.0, 0.0])])
    close(one)
    one.own([group(2, ["a", "d"], [0.0, 0.0])])
    assert close(one, 2).repeated == 0.5


@pytest.mark.parametrize("side", ["own", "external"])
def test_a_hack_bars_its_task_until_it_is_looked_at_again(side: str) -> None:
    now, told = [0.0], []
    one = Watch(began=lambda text: told.append(("began", text)), ended=lambda text: told.append(("ended", text)))
    one._clock = lambda: now[0]
    for index in range(3 * alarms.HACK_QUESTIONS):
        groups = [group(index, ["<answer>(P  ∨ q)</answer>", "x"], [1.0, 0.0], truth=f"truth {index}")]
        one.own(groups) if side == "own" else one.external(groups, sender(f"net{index % 3}"))
    assert one.bars("gcd", bytes(32))
    assert one.bars("gcd", b"other settings") == (side == "own")
    assert not one.bars("lcm", bytes(32))
    assert one.lasting == [("reward hack", "gcd" if side == "own" else "gcd with settings 00000000")]
    now[0] = alarms.HACK_SECONDS
    close(one)
    assert not one.bars("gcd", bytes(32))
    assert [what for what, _ in told] == ["began", "ended"]


def test_a_policy_that_gives_one_answer_and_seldom_earns_by_it_is_no_hack() -> None:
    one = Watch()
    for index in range(400):
        one.own([group(index, ["1", "1"], [float(index % 10 == 0)] * 2, truth=f"0.{index + 1}")])
    assert one.lasting == []


def test_answers_that_differ_in_capitals_and_spaces_are_one() -> None:
    one = Watch()
    for index, text in enumerate(["(P ∨ Q)", "(p ∨q)"] * (alarms.HACK_QUESTIONS // 2)):
        one.own([group(index, [text], [1.0], truth=f"truth {index}")])
    assert one.bars("gcd")


def collapsed(**levels: float) -> Watch:
    one = Watch()
    for number, right in enumerate([1.0] * 40 + [0.0] * 40):
        one.own([group(number, [str(number)], [right])])
        close(one, number + 1)
    assert one.lasting == [("collapse", "")]
    return one


@pytest.mark.parametrize(("local", "before", "after"), [(4, 5, 2), (4, 1, 0), (4, 0, 0), (0, 1, 1)])
def test_a_collapse_halves_j(local: int, before: int, after: int) -> None:
    training = TrainingSection(local_groups=local, external_groups=before) if local + before else None
    assert training is not None
    assert Watch().limit(training) is training
    assert collapsed().limit(training).external_groups == after


def test_a_drift_stops_sharing_until_it_is_over() -> None:
    one, policy = Watch(2), ToyPolicy()
    asyncio.run(one.measure(policy))
    policy.logprob = -9.0
    assert close(one, 1, policy).text_logprob is None
    assert one.shares
    assert close(one, 2, policy).text_logprob == -9.0
    assert not one.shares
    policy.logprob = -3.5
    close(one, 4, policy)
    assert one.shares
    assert policy.asked == 3


def test_a_policy_that_is_lost_is_measured_another_time() -> None:
    one = Watch()
    assert asyncio.run(one.measure(ToyPolicy(None))) is None
    assert one.status()["text_logprob_start"] is None


def test_a_checkpoint_keeps_what_later_levels_are_compared_with() -> None:
    one, policy = collapsed(), ToyPolicy()
    asyncio.run(one.measure(policy))
    policy.logprob = -9.0
    asyncio.run(one.measure(policy))
    kept: dict[str, Any] = json.loads(json.dumps(one.memory()))
    other = Watch()
    other.restore(kept)
    assert not other.shares
    assert other.limit(TrainingSection(external_groups=4)).external_groups == 2
    assert other.status()["text_logprob_start"] == -3.0
    assert {kind for kind, _ in other.lasting} == {"collapse", "drift"}


def under(settings: dict[str, Any]) -> str:
    config = NodeConfig.model_validate(settings)
    return watch.conditions(mixture.load(config.tasks), config)


EASY: dict[str, Any] = {"tasks": {"mixture": [{"name": "gcd"}]}}


@pytest.mark.parametrize(
    "changed",
    [
        {"tasks": {"mixture": [{"name": "lcm"}]}},
        {"tasks": {"mixture": [{"name": "gcd", "config": {"max_value": 10_000}}]}},
        {"tasks": {"mixture": [{"name": "gcd"}, {"name": "lcm", "weight": 3.0}]}},
        {"tasks": EASY["tasks"] | {"eval_questions": 50}},
        EASY | {"rollouts": {"completions_per_task": 2}},
        EASY | {"inference": {"max_completion_tokens": 16}},
        EASY | {"inference": {"temperature": 0.2}},
    ],
)
def test_levels_of_other_questions_raise_no_alarm(changed: dict[str, Any]) -> None:
    """No attack: an owner who took harder tasks had an alarm about collapse for ever, and half of J."""
    one = Watch()
    one.restore(None, under(EASY))
    one._collapse.memory = Fallen(best_any_right=0.95, lasts=True)
    one._drift.memory = Strayed(start=-3.0)
    for settings, lasts in ((EASY, True), (changed, False)):
        other = Watch()
        assert other.restore(json.loads(json.dumps(one.memory())), under(settings)) is lasts
        assert [kind for kind, _ in other.lasting] == ["collapse"] * lasts
        assert other.status()["text_logprob_start"] == -3.0, "what does not depend on questions stays"
        assert (other.limit(TrainingSection(external_groups=4)).external_groups == 2) == lasts
    earlier = {name: value for name, value in one.memory().items() if name != "conditions"}
    other = Watch()
    other.restore(earlier, under(EASY))
    assert other.lasting == [], "a checkpoint that does not say under which they were measured"


def test_what_the_levels_do_not_depend_on_changes_nothing() -> None:
    slower = EASY | {"training": {"lr": 1e-9, "external_groups": 1}}
    assert under(EASY) == under(json.loads(json.dumps(slower)))


def test_a_checkpoint_without_alarms_is_a_new_start() -> None:
    one = Watch()
    one.restore(None)
    assert one.shares
    assert one.lasting == []


def test_without_alarms_nothing_is_barred() -> None:
    one = Unwatched()
    for index in range(40):
        one.own([group(index, ["(P ∨ Q)"], [1.0], truth=f"truth {index}")])
        one.external([group(index, ["(P ∨ Q)"], [1.0], truth=f"truth {index}")], sender(f"net{index % 3}"))
    assert not one.bars("gcd", bytes(32))
