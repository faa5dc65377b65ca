"""Attacks by work: batches that are well formed, signed, and not what they should be."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import zstandard

from sapo_node.config import TaskEntry, TasksSection, TrainingSection
from sapo_node.rollouts import codec
from sapo_node.rollouts.codec import Opened, Rejected
from sapo_node.rollouts.schema import Completion, Group
from sapo_node.rollouts.verify import Reason
from sapo_node.swarm import protocol
from sapo_node.tasks.base import Judged, TaskRefused, TaskSpec, is_eval_question, question_sha256
from sapo_node.tasks.catalog import OFFERED
from sapo_node.tasks.scoring import eval_seed
from tests.rollouts.test_verify import Node, envelope, group_of, junk, spec_of, task_ref

replace = msgspec.structs.replace


def answers(*texts: str) -> list[Completion]:
    return [Completion(text=text, finish="stop", n_tokens=3) for text in texts]


def right(group: Group) -> str:
    """The true answer of one of `Node.group`'s groups."""
    return group.completions[0].text


def with_extra(node: Node, group: Group, **extra: Any) -> Opened:
    """The sender's batch with fields that the wire does not have, in its group and in each completion."""
    batch = envelope(node.sender, group).batch
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    plain["groups"][0] |= extra
    for completion in plain["groups"][0]["completions"]:
        completion |= extra
    data = codec._seal(b"B", zstandard.compress(msgspec.msgpack.encode(plain)), "test", node.sender).data
    return codec.open_batch(data, "test")


def test_a_wrong_truth_sent_along_is_not_read(node: Node) -> None:
    """Hope: a field named like one of the receiver's own (answer, truth, reward) overrides what it computes."""
    group = node.group()
    extra = {"answer": "not that", "truth": "not that", "reward": 1.0, "rewards": [0.0, 1.0, 0.0], "verifier": "exact"}
    opened = with_extra(node, group, **extra)
    assert opened.batch.groups == [group], "what the wire does not have is dropped"
    assert node.verify(group).groups[0].rewards == [1.0, 0.0, 1.0]


def test_the_question_of_an_easier_setting(node: Node) -> None:
    """Hope: the coordinates say hard, the answers are to an easy question, and the reward is for a hard one."""
    easy = node.group()
    hard = task_ref(index=easy.task.index, config={**easy.task.config, "min_digits": 4})
    verified = node.verify(replace(easy, task=hard))
    assert verified.reasons == [Reason.OTHER_QUESTION]


def test_settings_that_are_not_those_of_the_hash(node: Node) -> None:
    """Hope: the seed follows from the hash of one setting, and the question from another."""
    group = node.group()
    task = replace(group.task, config={**group.task.config, "min_digits": 4})
    assert node.verify(replace(group, task=task)).reasons == [Reason.WRONG_HASH]


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_a_question_by_a_seed_of_ones_choice(node: Node, seed: int) -> None:
    """Hope: ask what one likes best; the receiver takes the seed, or the hash, on trust."""
    task = task_ref(index=seed)
    chosen = node.runner.run(node.scorers.question(spec_of(task), seed))
    assert seed != node.seed(task)
    group = node.answered(task, chosen.text)
    assert node.verify(group).groups == []
    other = {protocol.question_seed("other", node.sender.public_key, task.epoch, task.name, task.config_hash, seed)}
    assert node.seed(task) not in other, "the swarm's name is part of the seed too"


def test_the_question_of_another_index_or_epoch(node: Node) -> None:
    """Hope: look through 4096 indices for the best question and put it at the coordinates one was given."""
    first, second = node.group(), node.group(skip=1)
    moved = replace(first, task=second.task)
    later = replace(first, task=task_ref(index=first.task.index, epoch=first.task.epoch + 1))
    assert node.verify(moved, later).reasons == [Reason.OTHER_QUESTION] * 2


def test_completions_swapped_between_two_groups_earn_nothing(node: Node) -> None:
    """Hope: right answers under the wrong question teach the wrong thing, with rewards that look right."""
    first, second = node.group(), node.group(skip=1)
    assert right(first) != right(second)
    swapped = [replace(first, completions=second.completions), replace(second, completions=first.completions)]
    verified = node.verify(*swapped)
    assert [group.rewards for group in verified.groups] == [[0.0] * 3] * 2
    assert verified.usable == 0, "no advantage, so nothing is learnt from them and they earn no merit"


def test_a_group_of_one_completion_is_refused(node: Node) -> None:
    """Hope: L = 1 makes a standard deviation of zero, or an advantage without a baseline."""
    with pytest.raises(Rejected, match="too few"):
        envelope(node.sender, replace(node.group(), completions=answers("4")))


def test_ragged_groups_are_judged_each_by_itself(node: Node) -> None:
    """Hope: groups of different sizes shift rewards from one completion to the next."""
    first, second = node.group(), node.group(skip=1)
    ragged = [replace(first, completions=first.completions[:2]), second]
    ragged.append(replace(node.group(skip=2), completions=answers(*["no"] * 63, right(node.group(skip=2)))))
    verified = node.verify(*ragged)
    assert [group.rewards for group in verified.groups] == [[1.0, 0.0], [1.0, 0.0, 1.0], [0.0] * 63 + [1.0]]


def test_the_same_group_twice_in_a_batch_is_refused(node: Node) -> None:
    """Hope: one good group, 32 times, is 32 times the weight and the merit."""
    group = node.group()
    with pytest.raises(Rejected, match="same coordinates"):
        envelope(node.sender, group, replace(group, completions=answers("a", "b")))


def test_a_default_spelt_out_is_another_question(node: Node) -> None:
    """Hope: {} and {"max_digits": 4} are one task, so the same question counts as two groups."""
    plain, spelt = task_ref(config={}), task_ref(config={"max_digits": 4})
    assert plain.config_hash != spelt.config_hash
    assert node.seed(plain) != node.seed(spelt)


def test_the_same_coordinates_again_with_other_answers(node: Node) -> None:
    """Hope: send a group, see what it earned, and send a better one for the same question."""
    group = node.group()
    verified = node.verify(group)
    node.runner.run(node.pool.add_external(verified.producer, verified.content_id, verified.groups, 0.0))
    assert node.verify(replace(group, completions=answers("x", right(group)))).reasons == [Reason.DUPLICATE]


def test_one_answer_64_times_has_no_advantage(node: Node) -> None:
    """Hope: a flood of one text, right or wrong, drowns all others."""
    group = node.group()
    for text in (right(group), "not that"):
        verified = node.verify(replace(group, completions=answers(*[text] * 64)))
        assert verified.reasons == [Reason.ACCEPTED]
        assert verified.usable == 0


def test_one_question_under_many_coordinates_is_judged_once(node: Node) -> None:
    """Hope: gcd has settings with four questions; one of them 32 times is all that is trained on."""
    config = {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 2}
    groups = []
    for index in range(64):
        task = task_ref(index=index, name="gcd", config=config)
        question = node.runner.run(node.scorers.question(spec_of(task), node.seed(task)))
        if not is_eval_question(question.sha256):
            groups.append(group_of(task, question.sha256, "1", "2"))
    asked = {group.question_sha256 for group in groups[:32]}
    verified = node.verify(*groups[:32])
    assert verified.reasons.count(Reason.ACCEPTED) == len(asked) <= 4
    assert len(node.judged) == len(asked), "the others cost no scorer"
    node.runner.run(node.pool.add_external(verified.producer, verified.content_id, verified.groups, 0.0))
    again = [group for group in groups[32:] if group.question_sha256 in asked]
    assert set(node.verify(*again).reasons) == {Reason.DUPLICATE}


def test_groups_that_are_cut_everywhere_are_no_stock(node: Node) -> None:
    """Hope: rewards differ, so the group is chosen; all completions say that they were cut, so none is trained on."""
    group = node.group()
    cut = replace(group, completions=[replace(one, finish="length") for one in group.completions])
    verified = node.verify(cut)
    assert (verified.groups[0].rewards, verified.usable) == ([1.0, 0.0, 1.0], 0)
    assert node.verify(cut, training=TrainingSection(mask_truncated=False)).usable == 1, (
        "unless cut ones are trained on"
    )
    node.runner.run(node.pool.add_external(verified.producer, verified.content_id, verified.groups, 0.0))
    assert node.runner.run(node.pool.external_candidates(0.0)) == []


def test_empty_completions_are_wrong_answers(node: Node) -> None:
    """Hope: an empty text breaks a tokenizer or a scorer, or counts as right."""
    verified = node.verify(replace(node.group(), completions=answers("", " ", "\n", "<answer></answer>")))
    assert [group.rewards for group in verified.groups] == [[0.0] * 4]
    assert verified.usable == 0


def test_the_answer_alone_is_taken_for_what_it_is(node: Node) -> None:
    """Hope: bare answers, from a calculator and not from a policy, earn what reasoning earns.

    They do, and SECURITY.md says so: nobody can tell who wrote a text.
    """
    group = node.group()
    verified = node.verify(replace(group, completions=answers(right(group), "1")))
    assert verified.groups[0].rewards == [1.0, 0.0]


def test_numbers_that_only_the_sender_knows_move_nothing(node: Node) -> None:
    """Hope: an absurd policy version, token count or time of sampling makes a group weigh more or stay longer."""
    group = node.group()
    most = protocol.MAX_INTEGER
    lying = replace(
        group,
        policy_version=most,
        sampled_at=1e300,
        completions=[replace(completion, n_tokens=most) for completion in group.completions],
    )
    [honest], [taken] = node.verify(group).groups, node.verify(lying).groups
    assert taken.rewards == honest.rewards
    assert not hasattr(taken.completions[0], "n_tokens"), "no token count of a sender is kept"


def test_an_evaluation_question_passed_off_as_another(node: Node) -> None:
    """Hope: others train on what they are measured with, because the hash sent along is not one of evaluation."""
    hidden = node.group(evaluation=True)
    assert is_eval_question(hidden.question_sha256)
    for false in (b"\xff" * 32, question_sha256("something else"), node.group().question_sha256):
        assert node.verify(replace(hidden, question_sha256=false)).groups == []


# Answers that hope to match


@pytest.fixture(scope="module")
def gym(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("mpl")))
        from sapo_node.tasks import reasoning_gym
    return reasoning_gym


def hedges(truth: str, wrong: list[str]) -> dict[str, str]:
    """Answers that hold the truth among others, or in a place where it does not count."""
    first = wrong[0] if wrong else "zzz"
    return {
        "the last of several": " ".join([*wrong, truth]),
        "one of several": ", ".join([*wrong[:2], truth, *wrong[2:]]),
        "one of several lines": "\n".join([*wrong[:2], truth, *wrong[2:]]),
        "the first tag of two": f"<answer>{truth}</answer><answer>{first}</answer>",
        "after a wrong tag": f"<answer>{first}</answer> {truth}",
        "denied": f"not {truth}",
        "64 KiB": (f"<answer>{truth}</answer>" * 2000)[: 64 * 1024 - 40] + f"<answer>{first}</answer>",
        "64 KiB without a tag": "\n".join([truth] * (60_000 // (len(truth) + 1))),
        "every number": " ".join(map(str, range(3000))),
    }


# Of propositional_logic any of many formulas is right, so several are no hedge; test_questions.py has its own attacks.
@pytest.mark.parametrize("name", [name for name in OFFERED if name != "propositional_logic"])
def test_64_kib_of_answers_hoping_that_one_matches(gym: Any, name: str) -> None:
    """Hope: the scorer looks for the truth anywhere in the text, so a text that holds every answer is right."""
    for seed in range(3):
        others = [gym.entry(gym.open_dataset(name, {}, s), name, s)["answer"] for s in range(50, 58)]
        dataset = gym.open_dataset(name, {}, seed)
        entry = gym.entry(dataset, name, seed)
        truth = entry["answer"]
        wrong = [text for text in others if gym.reward(dataset, name, entry, text) == 0.0][:4]
        paid = [k for k, text in hedges(truth, wrong or ["zzz"]).items() if gym.reward(dataset, name, entry, text)]
        assert paid == []


@pytest.mark.parametrize("tail", [" or 1/2", "x", "\nand whatever else", "$\\frac{1}{2}$"])
def test_a_right_fraction_with_something_behind_it_is_no_answer(gym: Any, tail: str) -> None:
    """Hope: babble behind the answer is rewarded too, and spreads through the swarm."""
    dataset = gym.open_dataset("fraction_simplification", {}, 0)
    entry = gym.entry(dataset, "fraction_simplification", 0)
    assert gym.reward(dataset, "fraction_simplification", entry, entry["answer"]) == 1.0
    assert gym.reward(dataset, "fraction_simplification", entry, entry["answer"] + tail) == 0.0


def test_a_batch_of_rejects_costs_no_scorer_and_its_sender_loses(node: Node) -> None:
    """Hope: 31 groups that cost nothing to make hide one that no honest node sends, or the other way round."""
    bad = group_of(task_ref(index=4000, config={"max_digits": 99}), b"\xff" * 32, "a", "b")
    verified = node.verify(*(node.group(skip=n) for n in range(3)), bad)
    assert (verified.outcome, verified.groups, node.judged) == ("reject", [], [])


def test_paths_in_names_open_nothing(node: Node, tmp_path: Path) -> None:
    """Hope: the name or version of a task becomes part of a path, an import or an attribute."""
    for name in ("../../etc/passwd", str(tmp_path), "os.system", "__class__", "gcd\0", "gcd/../gcd", ""):
        for source in ("reasoning_gym", "dataset"):
            group = group_of(task_ref(name=name, source=source, config={}), b"\xff" * 32, "a", "b")
            assert node.verify(group).reasons == [Reason.UNKNOWN_TASK]


class Burning:
    """A judge whose every question takes that much computing, and is then asked, or is none."""

    def __init__(self, node: Node, cpu: float, generated: bool) -> None:
        self.node, self.cpu, self.generated = node, cpu, generated
        self.calls = 0

    async def judge(self, spec: TaskSpec, seed: int, texts: list[str], *, strict: bool) -> Judged:
        self.calls += 1
        if not self.generated:
            refused = TaskRefused("there is none")
            refused.cpu = self.cpu
            raise refused
        return replace(await self.node.scorers.judge(spec, seed, texts, strict=strict), cpu=self.cpu)

    async def judge_row(self, *_: Any, **__: Any) -> Judged:
        raise AssertionError


def test_questions_that_cannot_be_generated_end_a_batch_and_cost_its_sender(node: Node) -> None:
    """Hope: coordinates in bounds whose generator tries for long and finds nothing are nobody's fault, 32 a batch."""
    burning = Burning(node, 0.3, generated=False)
    verified = node.verify(*(junk(index=i) for i in range(32)), judge=burning)
    assert (verified.outcome, burning.calls) == ("reject", 3)
    assert node.verify(junk(), junk(index=1), judge=burning).outcome == "ignore", "one or two may be bad luck"


def test_computing_in_vain_ends_a_batch(node: Node) -> None:
    """Hope: slow questions under false hashes look like another library version, 32 a batch."""
    burning = Burning(node, 0.7, generated=True)
    verified = node.verify(*(junk(index=i) for i in range(32)), judge=burning)
    assert (verified.outcome, burning.calls) == ("ignore", 5)
    assert verified.reasons == [Reason.OTHER_QUESTION] * 5 + [Reason.LATE] * 27


@pytest.mark.parametrize("cpu", [0.05, 0.25, 1.0])
def test_on_a_slow_machine_a_library_that_differs_is_heard_and_not_blamed(node: Node, cpu: float) -> None:
    """Hope: none; a slow machine took honest peers whose library differs for such that burn its time, and made them
    begin anew, before they could say that it is the task."""
    quarantine = Mock()
    quarantine.bars.return_value = quarantine.disagreed.return_value = False
    groups = [junk(index=i) for i in range(32)]
    verified = node.verify(*groups, judge=Burning(node, cpu, generated=True), quarantine=quarantine)
    assert verified.outcome == "ignore"
    assert quarantine.disagreed.call_count >= 3


def test_a_batch_takes_no_more_computing_than_its_budget(node: Node) -> None:
    """Hope: groups that are true and slow keep the one scorer for strangers from all others."""
    burning = Burning(node, 4.0, generated=True)
    verified = node.verify(*(node.group(skip=i) for i in range(4)), judge=burning)
    assert verified.reasons == [Reason.ACCEPTED, Reason.ACCEPTED, Reason.LATE, Reason.LATE]


@pytest.mark.parametrize("evaluated", [{}, {"max_terms": 3}])
def test_an_evaluation_question_in_another_dress(
    node: Node, monkeypatch: pytest.MonkeyPatch, evaluated: dict[str, Any]
) -> None:
    """Hope: keys, epochs and settings are free, so search until a seed is one of evaluation's (a minute of computing),
    and ask that question without spaces: the text is another, the problem is the same."""
    node.tasks = TasksSection(mixture=[TaskEntry(name="basic_arithmetic", config={"max_terms": 3})])
    seed = eval_seed(spec_of(task_ref(config=evaluated)), 9_999)
    dressed = junk(config={**evaluated, "whitespace": "no_space"})
    monkeypatch.setattr("sapo_node.rollouts.verify.question_seed", lambda *_: seed)  # in place of the search
    assert node.verify(dressed).reasons == [Reason.EVALUATION]
    monkeypatch.setattr("sapo_node.rollouts.verify.question_seed", lambda *_: seed + 1)
    assert node.verify(dressed).reasons == [Reason.OTHER_QUESTION]
