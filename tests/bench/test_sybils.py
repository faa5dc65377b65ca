"""The claim about sybils: aged honest peers keep half of what is trained on of others' groups, in every window."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts" / "bench"))

from sybils import WINDOW, Case, simulate


@pytest.mark.parametrize(("sybils", "rounds"), [(40, 2 * WINDOW), (400, WINDOW)])
def test_aged_honest_peers_keep_half_of_what_is_trained_on(sybils: int, rounds: int) -> None:
    case = Case("", honest=4, sybils=sybils, networks=sybils, honest_aged=True)
    mean, worst, trained = simulate(case, rounds, 4, random.Random(1))
    assert mean >= worst >= 0.5
    assert trained == 4.0, "and the crowd does not keep the node from having J groups"


def test_a_crowd_on_one_network_is_one_peer_in_a_fresh_swarm() -> None:
    case = Case("", honest=4, sybils=400, networks=1, honest_aged=False)
    mean, _, _ = simulate(case, WINDOW, 4, random.Random(1))
    assert mean >= 0.6


def test_the_papers_rule_does_not_tell_them_apart() -> None:
    case = Case("", honest=4, sybils=40, networks=40, honest_aged=True, rule="paper")
    mean, _, _ = simulate(case, WINDOW, 4, random.Random(1))
    assert mean < 0.3
