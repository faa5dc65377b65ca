"""The greeting: what it shows, and that a bad guest costs nothing."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from sapo_node.swarm import hello, protocol
from sapo_node.swarm.hello import Greeter, Verdict, judge
from sapo_node.swarm.p2p import Network
from tests.swarm.conftest import Loopback

OnLoopback = Callable[[Callable[[Loopback], Awaitable[None]]], None]
OWN = protocol.greeting("test")


async def greeter(network: Network, swarm: str = "test", own: bytes | None = None) -> Greeter:
    made = Greeter(network, swarm, own)
    await made.start()
    return made


def test_nodes_of_one_swarm_and_version_are_members() -> None:
    assert judge(OWN, protocol.greeting("test")) is Verdict.MEMBER


def test_another_name_is_another_swarm() -> None:
    assert judge(OWN, protocol.greeting("Test")) is Verdict.OTHER_SWARM


def test_a_node_that_still_reads_our_version_is_a_member() -> None:
    assert judge(OWN, protocol.greeting("test", protocol.PROTO, protocol.PROTO + 1)) is Verdict.MEMBER


@pytest.mark.parametrize("versions", [(2, 3), (0, 0)])
def test_versions_that_do_not_meet_are_told_before_swarms(versions: tuple[int, int]) -> None:
    assert judge(OWN, protocol.greeting("elsewhere", *versions)) is Verdict.OTHER_VERSION


@pytest.mark.parametrize("theirs", [b"", OWN[:-1], OWN + b"x", b"HTTP" + OWN[4:]])
def test_anything_else_is_no_node(theirs: bytes) -> None:
    assert judge(OWN, theirs) is Verdict.STRANGER


def test_both_sides_know_after_one_greeting(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        a, b = await loopback.swarm("ab")
        ga, gb = await greeter(a), await greeter(b)
        assert await gb.greet(a.peer_id) is Verdict.MEMBER
        assert gb.members == {a.peer_id}
        assert ga.members == ga.callers == {b.peer_id}
        assert gb.callers == set()

    on_loopback(body)


def test_a_foreign_peer_has_no_place_in_the_dht_until_it_greets_as_a_member(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        a, b = await loopback.swarm("ab")
        ga = await greeter(a)
        assert await (await greeter(b, "elsewhere")).greet(a.peer_id) is Verdict.OTHER_SWARM
        assert a.outside(b.peer_id)
        assert b.outside(a.peer_id)
        assert ga.members == set()
        assert await Greeter(b, "test").greet(a.peer_id) is Verdict.MEMBER
        assert not a.outside(b.peer_id)

    on_loopback(body)


def test_a_silent_peer_is_given_up(on_loopback: OnLoopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hello, "HELLO_SECONDS", 0.3)

    async def silent(_peer: str, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(hello.SIZE)
        await asyncio.sleep(5.0)

    async def body(loopback: Loopback) -> None:
        a, b = await loopback.swarm("ab")
        await a.serve_stream(protocol.HELLO_PROTOCOL, silent)
        assert await (await greeter(b)).greet(a.peer_id) is Verdict.SILENT

    on_loopback(body)


def test_what_is_remembered_is_bounded(on_loopback: OnLoopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hello, "MAX_REMEMBERED", 3)

    async def body(loopback: Loopback) -> None:
        made = await greeter(await loopback.start("a"))
        for number in range(10):
            made._note(f"peer {number}", protocol.greeting("elsewhere"))
        assert len(made._seen) == len(made._versions) == len(made._network.foreign) == 3
        assert "peer 9" in made._network.foreign

    on_loopback(body)
