"""Which network an address counts for, and that a network is drawn as one peer."""

import random
from collections import Counter

import pytest

from sapo_node.swarm.catalogue import Catalogue
from sapo_node.swarm.peers import PeerBook
from sapo_node.swarm.sources import network_of
from tests.swarm.test_catalogue import NOW, add, listing


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("/ip4/8.8.8.8/tcp/1", "8.8.8.0/24"),
        ("/ip6/2a00:1450:4001:830::200e/tcp/1", "2a00:1450:4001::/48"),
        ("/ip6/::ffff:8.8.8.8/tcp/1", "8.8.8.0/24"),
        ("/ip6/2002:808:808::1/tcp/1", "8.8.8.0/24"),  # 6to4: each IPv4 address has a /48
        ("/ip4/8.8.8.8/tcp/1/p2p/QmRelay/p2p-circuit", "relay 8.8.8.0/24"),
        ("/ip4/10.0.0.1/tcp/1/p2p/QmRelay/p2p-circuit", "relay QmRelay"),
        ("/ip4/10.0.0.1/tcp/1", ""),
        ("/ip4/100.64.0.1/tcp/1", ""),
        ("/ip4/127.0.0.1/tcp/1", ""),
        ("/ip6/fe80::1/tcp/1", ""),
        ("/ip6/fd00::1/tcp/1", ""),
        ("/dns4/example.org/tcp/1", ""),
        ("", ""),
    ],
)
def test_networks(address: str, network: str) -> None:
    assert network_of(address) == network


def test_peers_with_one_share_are_drawn_as_one() -> None:
    drawn: Counter[str] = Counter()
    for seed in range(200):
        c = Catalogue("me", 300.0, lambda peer_id, now: True, random.Random(seed), lambda peer_id: peer_id[0])
        for number in range(20):
            add(c, f"crowd{number}", listing(number))
        add(c, "honest", listing(99))
        wanted = c.take(NOW)
        assert wanted is not None
        drawn[wanted.peer_id[0]] += 1
    assert 70 < drawn["h"] < 130


def test_under_the_papers_rule_every_peer_is_drawn_for_itself() -> None:
    book = PeerBook()
    for peer_id in ("a", "b"):
        book.saw(peer_id, (), NOW)
        book.came_from(peer_id, "/ip4/8.8.8.8/tcp/1")
    assert [book.lot("a"), book.lot("b")] == ["a", "b"]
    book.fair = True
    assert book.lot("a") == book.lot("b")
