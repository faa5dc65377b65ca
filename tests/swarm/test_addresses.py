"""How far addresses lead, and where a node follows strangers."""

import pytest

from sapo_node.swarm import addresses
from sapo_node.swarm.addresses import Reach, followed, in_turn, is_multiaddr, listened, outward, reach


@pytest.mark.parametrize(
    ("host", "leads"),
    [
        ("ip4/8.8.8.8", Reach.ANYWHERE),
        ("ip6/2001:4860::1", Reach.ANYWHERE),
        ("dns4/example.org", Reach.ANYWHERE),
        ("ip4/10.1.2.3", Reach.PRIVATE),
        ("ip4/172.17.0.1", Reach.PRIVATE),
        ("ip4/192.168.1.1", Reach.PRIVATE),
        ("ip4/100.64.0.1", Reach.PRIVATE),
        ("ip6/fd00::1", Reach.PRIVATE),
        ("ip4/127.8.0.1", Reach.LOOPBACK),
        ("ip6/::1", Reach.LOOPBACK),
        ("ip6/::ffff:127.0.0.1", Reach.LOOPBACK),
        ("ip6/::ffff:10.0.0.1", Reach.PRIVATE),
        ("ip4/169.254.169.254", Reach.NOWHERE),
        ("ip6/fe80::1", Reach.NOWHERE),
        ("ip6zone/eth0/ip6/fe80::1", Reach.NOWHERE),
        ("ip4/0.0.0.0", Reach.NOWHERE),
        ("ip4/0.1.2.3", Reach.NOWHERE),
        ("ip6/::", Reach.NOWHERE),
        ("ip6/64:ff9b::7f00:1", Reach.NOWHERE),
        ("ip4/224.0.0.1", Reach.NOWHERE),
        ("ip6/ff02::1", Reach.NOWHERE),
        ("ip4/255.255.255.255", Reach.NOWHERE),
        ("ip4/nonsense", Reach.NOWHERE),
        ("unix/run/docker.sock", Reach.NOWHERE),
    ],
)
def test_how_far_an_address_leads(host: str, leads: Reach) -> None:
    assert reach(f"/{host}/tcp/1") is leads


@pytest.mark.parametrize(
    ("own", "leads"),
    [
        (["/ip4/127.0.0.1/tcp/1"], {Reach.ANYWHERE, Reach.LOOPBACK}),
        (["/ip4/127.0.0.1/tcp/1", "/ip6/fe80::1/tcp/1"], {Reach.ANYWHERE, Reach.LOOPBACK}),
        (["/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.2/tcp/1"], {Reach.ANYWHERE, Reach.PRIVATE}),
        (["/ip4/127.0.0.1/tcp/1", "/ip4/8.8.8.8/tcp/1"], {Reach.ANYWHERE}),
        ([], {Reach.ANYWHERE}),
    ],
)
def test_strangers_are_followed_as_far_as_the_node_is_reached_itself(own: list[str], leads: set[Reach]) -> None:
    assert followed(own) == leads


def test_the_way_outward_is_an_address_or_none() -> None:
    assert all(reach(address) is not Reach.NOWHERE for address in outward())


def test_a_node_that_announces_another_address_still_knows_its_private_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "outward", lambda: ["/ip4/192.168.1.5"])
    everywhere = "/ip4/0.0.0.0/tcp/1"
    assert followed(["/ip4/8.8.8.8/tcp/1", *listened([everywhere], announced=True)]) == {Reach.ANYWHERE, Reach.PRIVATE}
    assert listened([everywhere], announced=False) == [everywhere]
    assert listened(["/ip4/127.0.0.1/tcp/1"], announced=True) == ["/ip4/127.0.0.1/tcp/1"]


def test_everyones_first_comes_before_any_second() -> None:
    assert in_turn([["a1", "a2", "a3"], [], ["b1"], ["c1", "c2"]]) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_what_a_terminal_would_obey_is_no_multiaddr() -> None:
    assert is_multiaddr("/dns4/example.org/tcp/1")
    wrong = ("", "x", "/a b", "/a\n", "/a\x1b[2J", "/a\x9b2J", "/a\u202e")
    assert not any(map(is_multiaddr, wrong))
