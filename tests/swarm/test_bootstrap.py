"""Joining: whom to dial when, what is told to the owner, and a bootstrap that comes late. Nothing ends the node."""

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from sapo_node.config import SwarmSection
from sapo_node.swarm import bootstrap, protocol
from sapo_node.swarm.bootstrap import Attempts, Bootstrap, JoinState, Outcome, Result, explain_failure
from sapo_node.swarm.candidates import Candidates
from sapo_node.swarm.dht import SwarmDHT
from sapo_node.swarm.hello import Greeter
from sapo_node.swarm.p2p import Network
from sapo_node.swarm.peers import Found, PeerBook
from tests.swarm.conftest import Loopback

OnLoopback = Callable[[Callable[[Loopback], Awaitable[None]]], None]


def address(name: str) -> str:
    return f"/ip4/127.0.0.1/tcp/1/p2p/{name}"


def attempts() -> Attempts:
    return Attempts("me", random.Random(0))


def listed(addresses: list[str], source: str = "one") -> dict[str, str]:
    return dict.fromkeys(addresses, source)


# Whom to dial when


def test_all_addresses_are_dialled_side_by_side_in_their_order() -> None:
    given = [address(name) for name in "bca"]
    assert attempts().due(0.0, [], listed(given)) == given


def test_a_node_does_not_dial_itself() -> None:
    assert attempts().due(0.0, [], listed([address("me")])) == []


def test_dials_in_flight_are_not_begun_again_and_count_against_the_bound() -> None:
    given = [address(f"p{i}") for i in range(20)]
    flying = given[:3]
    assert attempts().due(0.0, [], listed(given), flying) == given[3 : bootstrap.MAX_AT_ONCE]


def simulated(addresses: dict[str, str], wanted: str, seconds: float = 600.0) -> float:
    """When `wanted` is dialled first, where every other address swallows each dial for ten seconds."""
    a, ends, now = attempts(), dict[str, float](), 0.0
    while now < seconds:
        for done in [one for one, end in ends.items() if end <= now]:
            del ends[done]
            a.report(done, Result.UNREACHABLE, now, lonely=True)
        for one in a.due(now, [], addresses, ends):
            if one == wanted:
                return now
            ends[one] = now + 10.0
        now += 1.0
    raise AssertionError(f"not dialled within {seconds} s")


def test_addresses_that_swallow_dials_keep_no_other_waiting_for_ever() -> None:
    dead = [address(f"dead{i}") for i in range(64)]
    assert simulated(listed([*dead, address("good")]), address("good")) <= 10.0 * (64 / bootstrap.MAX_AT_ONCE + 1)


def test_each_source_has_its_share_of_the_dials() -> None:
    mine = {address("mine"): "mine"}
    dead = listed([address(f"dead{i}") for i in range(64)], "theirs")
    assert simulated({**dead, **mine}, address("mine")) == 0.0
    late = attempts().due(0.0, [], {**dead, **mine}, list(dead)[: bootstrap.MAX_AT_ONCE - 1])
    assert late == [address("mine")]


def test_a_node_with_company_dials_lost_peers_rarely() -> None:
    a, given = attempts(), [address("a"), address("b")]
    assert a.due(0.0, ["b"], listed(given)) == [address("a")]
    a.report(address("a"), Result.UNREACHABLE, 0.0, lonely=False)
    assert a.due(100.0, ["b"], listed(given)) == []
    assert a.due(451.0, ["b"], listed(given)) == [address("a")]


def test_a_peer_of_another_swarm_is_asked_again_only_rarely_also_by_a_lonely_node() -> None:
    a = attempts()
    a.report(address("a"), Result.OTHER_SWARM, 0.0, lonely=True)
    assert a.due(100.0, [], listed([address("a")])) == []
    assert a.due(451.0, [], listed([address("a")])) == [address("a")]


def test_pauses_double_up_to_a_bound_while_the_node_is_alone() -> None:
    a, now, pauses = attempts(), 0.0, []
    for _ in range(12):
        a.report(address("a"), Result.UNREACHABLE, now, lonely=True)
        start = now
        while not a.due(now, [], listed([address("a")])):
            now += 0.1
        pauses.append(now - start)
    assert 0.4 < pauses[0] < 1.7
    assert max(pauses) <= 1.5 * bootstrap.LONELY_PAUSE_SECONDS + 0.2
    assert min(pauses[-3:]) >= 0.5 * bootstrap.LONELY_PAUSE_SECONDS - 0.2


def test_a_node_that_lost_everyone_dials_at_once() -> None:
    a = attempts()
    a.report(address("a"), Result.CONNECTED, 0.0, lonely=False)
    assert a.due(1.0, [], listed([address("a")])) == []
    a.lost_everyone()
    assert a.due(1.0, [], listed([address("a")])) == [address("a")]


def test_each_outcome_is_news_once() -> None:
    a = attempts()
    told = [
        a.report(address("a"), result, 0.0, lonely=True)
        for result in (
            Result.UNREACHABLE,
            Result.NOT_TRIED,
            Result.UNREACHABLE,
            Result.CONNECTED,
            Result.CONNECTED,
            Result.UNREACHABLE,
        )
    ]
    assert told == [True, False, False, True, False, True]


def test_dials_and_memory_are_bounded() -> None:
    a = attempts()
    many = [address(f"p{i}") for i in range(1000)]
    assert len(a.due(0.0, [], listed(many))) == bootstrap.MAX_AT_ONCE
    for one in many:
        a.report(one, Result.UNREACHABLE, 0.0, lonely=True)
    assert len(a._attempts) <= bootstrap.MAX_REMEMBERED


def test_the_reason_told_is_that_of_the_address_dialled() -> None:
    reason = "connect: all dials failed * [/ip4/127.0.0.1/tcp/2] peer id mismatch: x * [/ip4/127.0.0.1/tcp/1] refused"
    outcome = explain_failure(address("a"), reason)
    assert outcome.result is Result.UNREACHABLE
    assert "(refused)" in outcome.message


def why(reason: str) -> str:
    """What is told of an address for a reason in p2pd's words."""
    return explain_failure(address("a"), f"connect: all dials failed * [/ip4/127.0.0.1/tcp/1] {reason}").message


def test_a_connection_that_is_taken_is_no_silence() -> None:
    negotiating = "failed to negotiate security protocol"
    assert "takes connections but says nothing" in why(f"{negotiating}: context deadline exceeded")
    assert "takes connections but does not speak libp2p (EOF)" in why(f"{negotiating}: EOF")
    assert "does not answer" in why("dial tcp4 127.0.0.1:1: connect: connection refused")


def test_a_name_without_an_entry_is_told() -> None:
    outcome = explain_failure("/dns4/nowhere.test/tcp/1/p2p/a", "failed to dial: failed to dial a: no good addresses")
    assert "its name has no DNS entry" in outcome.message


# Real nodes


class Joining:
    """A node's bootstrap at work, and what it told."""

    def __init__(self, network: Network, bootstrap: Bootstrap, book: PeerBook, told: list[Outcome]) -> None:
        self.network, self.bootstrap, self.book, self.told = network, bootstrap, book, told

    def found(self, peer_id: str) -> str:
        record = self.book.get(peer_id)
        return record.found if record else ""


async def start(
    loopback: Loopback,
    name: str,
    initial: list[str],
    book: PeerBook | None = None,
    *,
    swarm: str = "test",
    greeting: bytes | None = None,
    **options: Any,
) -> Joining:
    network = await loopback.start(name, **options)
    dht = await SwarmDHT.start(network, swarm)
    loopback.stack.push_async_callback(dht.close)
    told: list[Outcome] = []
    book = book or PeerBook()
    greeter = Greeter(network, swarm, greeting)
    await greeter.start()
    settings = SwarmSection(name=swarm, initial_peers=initial, public_peers=False)
    made = Bootstrap(network, dht, greeter, Candidates(settings, book, print), book, told.append)
    task = asyncio.create_task(made.run())

    async def stop() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    loopback.stack.push_async_callback(stop)
    return Joining(network, made, book, told)


async def until(condition: Callable[[], object], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_node_without_addresses_is_alone_until_it_is_found(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        first = await start(loopback, "a", [])
        await until(lambda: first.bootstrap.state is JoinState.ALONE, 3.0)
        second = await start(loopback, "b", [await loopback.address_of(first.bootstrap._network)])
        await until(lambda: second.bootstrap.state is JoinState.JOINED, 3.0)
        await until(lambda: first.bootstrap.state is JoinState.JOINED, 5.0)
        assert first.bootstrap._dht.neighbours() == second.bootstrap._dht.neighbours() == 1
        assert [o.result for o in second.told] == [Result.CONNECTED]
        await until(lambda: second.found(first.network.peer_id) == Found.INITIAL, 3.0)
        assert first.found(second.network.peer_id) == Found.INBOUND

    on_loopback(body)


@pytest.mark.slow
def test_a_dead_bootstrap_is_told_once_and_joined_when_it_appears(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        port = free_port()
        target = f"/ip4/127.0.0.1/tcp/{port}/p2p/{loopback.identity('a').peer_id}"
        node = await start(loopback, "b", [target])
        await until(lambda: node.bootstrap.state is JoinState.ALONE, 5.0)
        await asyncio.sleep(4.0)
        assert [o.result for o in node.told] == [Result.UNREACHABLE]
        assert target in node.told[0].message
        assert node.bootstrap.unreached == [node.told[0].message]
        await start(loopback, "a", [], listen=[f"/ip4/127.0.0.1/tcp/{port}"])
        await until(lambda: node.bootstrap.state is JoinState.JOINED, 40.0)
        assert node.bootstrap._dht.neighbours() == 1
        assert [o.result for o in node.told] == [Result.UNREACHABLE, Result.CONNECTED]
        assert node.bootstrap.unreached == []

    on_loopback(body)


def test_a_wrong_peer_id_is_told_by_name(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        other = await loopback.start("a")
        target = (await loopback.address_of(other)).replace(other.peer_id, loopback.identity("x").peer_id)
        node = await start(loopback, "b", [target])
        await until(lambda: node.told, 5.0)
        assert node.told[0].result is Result.WRONG_PEER_ID
        assert "another key" in node.told[0].message
        assert other.peer_id in node.told[0].message
        await until(lambda: node.bootstrap.state is JoinState.ALONE, 3.0)

    on_loopback(body)


def test_an_address_with_the_nodes_own_peer_id_is_told_unless_it_is_its_own(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        other = await start(loopback, "a", [])
        own = loopback.identity("b").peer_id
        wrong = (await loopback.address_of(other.network)).replace(other.network.peer_id, own)
        port = free_port()
        listen = f"/ip4/127.0.0.1/tcp/{port}"
        node = await start(loopback, "b", [wrong, f"{listen}/p2p/{own}"], listen=[listen])
        await until(lambda: node.told, 5.0)
        await asyncio.sleep(2 * bootstrap.CHECK_SECONDS)
        assert [(o.address, o.result) for o in node.told] == [(wrong, Result.ITSELF)]
        assert "own peer id" in node.bootstrap.unreached[0]

    on_loopback(body)


def test_cached_peers_stand_in_for_a_dead_bootstrap(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        first = await start(loopback, "a", [])
        known = PeerBook()
        network = first.bootstrap._network
        known.saw(network.peer_id, [(await loopback.address_of(network)).partition("/p2p/")[0]], time.time())
        dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{loopback.identity('x').peer_id}"
        node = await start(loopback, "b", [dead], PeerBook(known=known.best(time.time())))
        await until(lambda: node.bootstrap.state is JoinState.JOINED, 5.0)
        await until(lambda: len(node.told) == 2, 5.0)
        assert {o.result for o in node.told} == {Result.CONNECTED, Result.UNREACHABLE}
        assert node.found(network.peer_id) == Found.CACHED

    on_loopback(body)


def test_a_node_whose_p2pd_died_does_not_raise(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        node = await start(loopback, "b", [address(loopback.identity("x").peer_id)])
        await node.bootstrap._network.close()
        await asyncio.sleep(2 * bootstrap.CHECK_SECONDS)
        await until(lambda: node.bootstrap.state is JoinState.ALONE, 3.0)

    on_loopback(body)


# Addresses that lead to the wrong place


def test_a_peer_of_another_swarm_is_told_by_name_and_let_go(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        other = await start(loopback, "a", [], swarm="elsewhere")
        target = await loopback.address_of(other.network)
        node = await start(loopback, "b", [target])
        await until(lambda: node.told, 5.0)
        assert node.told[0].result is Result.OTHER_SWARM
        assert target in node.told[0].message
        assert "swarm.name" in node.told[0].message
        await until(lambda: node.bootstrap.state is JoinState.ALONE, 5.0)
        assert node.bootstrap._dht.neighbours() == other.bootstrap._dht.neighbours() == 0

    on_loopback(body)


@pytest.mark.parametrize(("speaks", "advice"), [(2, "Update this node."), (0, "Update that node.")])
def test_a_peer_of_another_wire_version_is_told_by_name(on_loopback: OnLoopback, speaks: int, advice: str) -> None:
    async def body(loopback: Loopback) -> None:
        greeting = protocol.greeting("test", speaks, speaks)
        other = await start(loopback, "a", [], greeting=greeting)
        target = await loopback.address_of(other.network)
        node = await start(loopback, "b", [target])
        await until(lambda: node.told, 5.0)
        assert node.told[0].result is Result.OTHER_VERSION
        assert target in node.told[0].message
        assert f"wire version {speaks}" in node.told[0].message
        assert advice in node.told[0].message

    on_loopback(body)


def test_a_libp2p_host_that_is_no_node_is_told_by_name(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        target = await loopback.address_of(await loopback.start("a"))
        node = await start(loopback, "b", [target])
        await until(lambda: node.told, 5.0)
        assert node.told[0].result is Result.NOT_A_NODE
        assert target in node.told[0].message

    on_loopback(body)


@pytest.mark.slow
def test_a_black_hole_is_told_by_name_and_holds_nobody_up(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        with socket.socket() as hole:  # takes connections and never says a word
            hole.bind(("127.0.0.1", 0))
            hole.listen(8)
            dead = f"/ip4/127.0.0.1/tcp/{hole.getsockname()[1]}/p2p/{loopback.identity('x').peer_id}"
            first = await start(loopback, "a", [])
            began = time.monotonic()
            node = await start(loopback, "b", [dead, await loopback.address_of(first.network)])
            await until(lambda: node.bootstrap.state is JoinState.JOINED, 5.0)
            assert time.monotonic() - began < 5.0
            await until(lambda: len(node.told) == 2, 20.0)
            assert [o.result for o in node.told] == [Result.CONNECTED, Result.UNREACHABLE]
            assert f"{dead} takes connections but says nothing" in node.told[1].message

    on_loopback(body)


@pytest.mark.slow
def test_alone_with_a_black_hole_a_node_says_so(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        with socket.socket() as hole:
            hole.bind(("127.0.0.1", 0))
            hole.listen(8)
            dead = f"/ip4/127.0.0.1/tcp/{hole.getsockname()[1]}/p2p/{loopback.identity('x').peer_id}"
            node = await start(loopback, "b", [dead])
            await until(lambda: node.told, 20.0)
            assert node.told[0].result is Result.UNREACHABLE
            assert dead in node.told[0].message
            await until(lambda: node.bootstrap.state is JoinState.ALONE, 3.0)

    on_loopback(body)
