"""Attacks on what the alarms believe of others' groups."""

import re
from typing import Any

from sapo_node.monitor.alarms import Sender
from sapo_node.monitor.watch import Watch
from sapo_node.rollouts.schema import Group
from sapo_node.rollouts.verify import Reason
from sapo_node.tasks.base import is_eval_question
from tests.rollouts.test_verify import Node, group_of, spec_of, task_ref

STYLES = ["latex_inline", "latex_frac", "latex_dfrac"]
HALVES: dict[str, Any] = {"min_value": 1, "max_value": 2, "max_factor": 10_000, "styles": STYLES}


def test_an_odd_form_earns_nothing_where_the_owner_asks_for_one(node: Node) -> None:
    """Hope: right answers in a form of one's own are rewarded as any, and so that form is learnt."""
    group = node.group()
    truth, wrong = group.completions[0].text, group.completions[1].text
    odd = group_of(group.task, group.question_sha256, f"<answer>{truth}</answer>", f"\n\n{truth}", f"  {truth}", wrong)
    assert node.verify(odd).groups[0].rewards == [1.0, 1.0, 1.0, 0.0]
    node.scorers._form = "bare"
    try:
        assert node.verify(odd).groups[0].rewards == [0.0] * 4, "no advantage: nothing of it is trained on"
        usual = group_of(group.task, group.question_sha256, truth, wrong)
        assert node.verify(usual).groups[0].rewards == [1.0, 0.0]
    finally:
        node.scorers._form = "any"


def test_right_answers_to_one_truth_in_many_spellings_are_no_hack(node: Node) -> None:
    """Hope: one free key, one batch of right answers, and everybody's groups of a healthy task are left aside."""
    groups: list[Group] = []
    for index in range(300):
        task = task_ref(name="fraction_simplification", config=HALVES, index=index)
        question = node.runner.run(node.scorers.question(spec_of(task), node.seed(task)))
        above, below = map(int, re.findall("[0-9]+", question.text)[:2])
        if 2 * above == below and not is_eval_question(question.sha256):
            groups.append(group_of(task, question.sha256, "1/2", "1/2"))
    verified = node.verify(*groups[:32])
    assert verified.reasons == [Reason.ACCEPTED] * 32
    watch = Watch()
    watch.external(verified.groups, Sender(verified.producer, verified.producer, verified.producer))
    assert watch.lasting == []
