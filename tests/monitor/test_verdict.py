"""The verdict says "learnt" when the paired scores rose beyond chance, and at no other time."""

import numpy as np
import pytest

from sapo_node.monitor import verdict
from sapo_node.monitor.metrics import EvalRecord, QuestionScore, Record, RoundRecord, eval_record


def evaluation(scores: list[float], version: int) -> EvalRecord:
    questions = [QuestionScore(f"task{number % 2}", f"{number:016x}", score) for number, score in enumerate(scores)]
    return eval_record(questions, round=version, time=float(version), policy_version=version, samples=1)


def node(before: list[float], after: list[float], accepted: int = 3) -> list[Record]:
    rounds = [
        RoundRecord(round=number, time=1.0, policy_version=number, groups_accepted=accepted) for number in range(1, 5)
    ]
    return [evaluation(before, 0), *rounds, evaluation(after, 4)]


def draws(seed: int, probability: float, count: int = 200) -> list[float]:
    return [float(value) for value in np.random.default_rng(seed).random(count) < probability]


def test_a_clear_rise_is_learnt_with_its_numbers() -> None:
    found = verdict.judge([node(draws(1, 0.1), draws(2, 0.4)), node(draws(3, 0.1), draws(4, 0.4))])
    assert found.learnt
    assert found.change is not None
    assert 0.2 < found.change.low < found.change.end - found.change.start < found.change.high < 0.4
    assert found.sentence.startswith("The swarm learnt: its held-out score went from 0.")
    assert "2 nodes, 200 questions" in found.sentence
    assert found.sentence.endswith("and 24 groups crossed the swarm.")


def test_equal_evaluations_did_not_learn() -> None:
    scores = draws(5, 0.3)
    found = verdict.judge([node(scores, scores)] * 4)
    assert not found.learnt
    assert found.sentence.startswith("The swarm did not learn: its held-out score stayed at 0.")
    assert "(+0.000, 90 % interval +0.000 to +0.000, 4 nodes" in found.sentence


def test_a_fall_did_not_learn() -> None:
    found = verdict.judge([node(draws(6, 0.5), draws(7, 0.2))])
    assert not found.learnt
    assert found.sentence.startswith("The node did not learn")
    assert "chance" not in found.sentence


def test_a_rise_within_chance_did_not_learn_and_says_so() -> None:
    before = [0.0] * 99 + [0.0]
    after = [0.0] * 99 + [1.0]
    found = verdict.judge([node(before, after)])
    assert not found.learnt
    assert "which may be chance" in found.sentence


def test_no_change_is_rarely_called_learning() -> None:
    """A 90 % interval leaves 5 % above; 200 runs without any change stay near it."""
    false = sum(
        verdict.bootstrap(np.array(draws(seed, 0.3)) - np.array(draws(10_000 + seed, 0.3)), resamples=500)[0] > 0
        for seed in range(200)
    )
    assert 2 <= false <= 20


def test_the_interval_matches_the_normal_one() -> None:
    changes = np.random.default_rng(8).normal(0.1, 1.0, 400)
    low, high = verdict.bootstrap(changes)
    half = 1.645 * changes.std() / 20
    assert low == pytest.approx(changes.mean() - half, abs=0.01)
    assert high == pytest.approx(changes.mean() + half, abs=0.01)


def test_only_questions_asked_twice_count() -> None:
    first, last = evaluation([0.0, 0.0, 1.0], 0), evaluation([1.0, 1.0], 4)
    before, after = verdict.paired([verdict.NodeEvals(first, last)])
    assert before.tolist() == [0.0, 0.0]
    assert after.tolist() == [1.0, 1.0]


def test_a_question_counts_once_as_the_mean_over_nodes() -> None:
    nodes = [
        verdict.NodeEvals(evaluation([0.0], 0), evaluation([1.0], 4)),
        verdict.NodeEvals(evaluation([0.0], 0), evaluation([0.0], 4)),
    ]
    before, after = verdict.paired(nodes)
    assert before.tolist() == [0.0]
    assert after.tolist() == [0.5]


def test_a_node_that_never_trained_is_not_compared() -> None:
    idle: list[Record] = [evaluation([0.0] * 40, 0), evaluation([0.0] * 40, 0)]
    found = verdict.judge([idle, node([0.0] * 40, [1.0] * 40)])
    assert found.learnt
    assert "1 of 2 nodes, 40 questions" in found.sentence


def test_without_evaluations_nothing_is_claimed() -> None:
    found = verdict.judge([[], []])
    assert not found.learnt
    assert found.sentence == (
        "The swarm cannot be judged: no node was evaluated both before and after training, "
        "and no group crossed the swarm."
    )


def test_the_same_records_give_the_same_sentence() -> None:
    nodes = [node(draws(9, 0.1), draws(10, 0.2))]
    assert verdict.judge(nodes).sentence == verdict.judge(nodes).sentence
