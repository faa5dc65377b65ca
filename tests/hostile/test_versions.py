"""Attacks by disagreement, through the whole verifier; who is heard at all is in tests/rollouts/test_quarantine.py."""

from typing import Any

import msgspec
import pytest

from sapo_node.identity import Identity
from sapo_node.rollouts.quarantine import FRESH_SECONDS, QUARANTINE_SECONDS, VOICES, Quarantine
from sapo_node.rollouts.schema import Group
from sapo_node.rollouts.verify import Reason
from sapo_node.swarm.peers import PeerBook
from sapo_node.tasks.base import Question
from tests.aged import work_a_day
from tests.rollouts.test_verify import NOW, Node, spec_of, task_ref


class Swarm:
    """A node that judges, and peers with histories of their own in its book."""

    def __init__(self, node: Node) -> None:
        self.node, self.home = node, node.sender
        self.book = PeerBook()
        self.quarantine = Quarantine(self.book)

    def peer(self, name: str, aged: bool) -> Identity:
        """A peer of another network each; an aged one agreed with the node about gcd, a day ago and now."""
        made = Identity.create(self.node.folder / f"{name}.key")
        if aged:
            work_a_day(self.book, made.peer_id, NOW)
            self.quarantine.agreed("gcd", made.peer_id, NOW)
        return made

    def sends(self, peer: Identity, right: bool, skip: int = 0) -> Reason:
        """A peer sends a sum, asked as this node asks it or not; what became of it."""
        self.node.sender = peer
        group = self.node.group(skip=skip)
        if not right:
            group = other(group)
        verified = self.node.verify(group, sender=peer, quarantine=self.quarantine)
        self.began = verified.quarantined
        return verified.reasons[0]


def other(group: Group) -> Group:
    return msgspec.structs.replace(group, question_sha256=b"\xfe" * 32)


@pytest.fixture
def swarm(node: Node) -> Swarm:
    return Swarm(node)


def test_40_free_identities_cannot_switch_a_task_off(swarm: Swarm) -> None:
    """Hope: forty fresh keys that all disagree about the task that a rival learns best from end its exchange."""
    for n in range(40):
        assert swarm.sends(swarm.peer(f"free{n}", aged=False), right=False) is Reason.OTHER_QUESTION
    assert swarm.quarantine.tasks(NOW) == []
    assert swarm.sends(swarm.peer("honest", aged=False), right=True) is Reason.ACCEPTED


def test_a_false_hash_alone_costs_its_sender_nothing_and_nobody_else_anything(swarm: Swarm) -> None:
    """Hope: who has another version of the library is punished like a liar, and honest nodes shun each other."""
    late = swarm.peer("late", aged=True)
    before = swarm.book.score(late.peer_id, NOW)
    assert swarm.sends(late, right=False).outcome == "ignore"
    assert swarm.book.score(late.peer_id, NOW) == before
    assert swarm.sends(late, right=True) is Reason.ACCEPTED


def test_when_all_trusted_peers_disagree_newcomers_groups_are_left_aside_for_a_time(swarm: Swarm) -> None:
    """Hope: a library that differs here in one task keeps the scorers busy with groups that come to nothing."""
    for n in range(VOICES):
        swarm.sends(swarm.peer(f"old{n}", aged=True), right=False)
    assert swarm.began == ["basic_arithmetic"]
    judged = len(swarm.node.judged)
    assert swarm.sends(swarm.peer("new", aged=False), right=True) is Reason.QUARANTINE
    assert len(swarm.node.judged) == judged, "no scorer is asked"
    assert Reason.QUARANTINE.outcome == "ignore"
    assert swarm.quarantine.tasks(NOW + QUARANTINE_SECONDS) == []


def test_own_groups_go_on_during_a_quarantine(swarm: Swarm) -> None:
    """Hope: a task that is switched off is not even trained on from one's own rollouts."""
    for n in range(VOICES):
        swarm.sends(swarm.peer(f"old{n}", aged=True), right=False)
    task = task_ref(index=9)
    assert isinstance(swarm.node.runner.run(swarm.node.scorers.question(spec_of(task), 5)), Question)


def test_aged_liars_are_outweighed_by_one_trusted_peer(swarm: Swarm) -> None:
    """Hope: patience. Identities that worked honestly for a day all lie at the same moment."""
    honest = swarm.peer("honest", aged=True)
    assert swarm.sends(honest, right=True) is Reason.ACCEPTED
    for n in range(2 * VOICES):
        swarm.sends(swarm.peer(f"liar{n}", aged=True), right=False)
    assert swarm.quarantine.tasks(NOW) == []
    later: Any = NOW + FRESH_SECONDS + 1
    assert swarm.quarantine.tasks(later) == []


def test_a_quarantine_ends_when_a_trusted_peer_agrees(swarm: Swarm) -> None:
    """Hope: liars that were quick, before any trusted peer had spoken, keep a task off for good."""
    for n in range(VOICES):
        swarm.sends(swarm.peer(f"liar{n}", aged=True), right=False)
    assert swarm.sends(swarm.peer("honest", aged=True), right=True) is Reason.ACCEPTED
    assert swarm.quarantine.tasks(NOW) == []
    assert swarm.sends(swarm.peer("new", aged=False), right=True) is Reason.ACCEPTED
