"""Joining: whom to dial when, what is told to the owner, and a bootstrap that comes late. Nothing ends the node."""

import asyncio
import random
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from sapo_node.swarm import bootstrap
from sapo_node.swarm.bootstrap import Attempts, Bootstrap, JoinState, Outcome, Result, explain_failure
from sapo_node.swarm.dht import SwarmDHT
from sapo_node.swarm.peers import PeerBook
from tests.swarm.conftest import Loopback

OnLoopback = Callable[[Callable[[Loopback], Awaitable[None]]], None]


def address(name: str) -> str:
    return f"/ip4/127.0.0.1/tcp/1/p2p/{name}"


def attempts(*initial: str) -> Attempts:
    return Attempts("me", [address(name) for name in initial], random.Random(0))


# Whom to dial when


def test_initial_and_cached_peers_are_dialled_side_by_side() -> None:
    assert attempts("a", "b").due(0.0, [], [address("c")]) == [address("a"), address("b"), address("c")]


def test_a_node_does_not_dial_itself() -> None:
    assert attempts("me").due(0.0, [], []) == []


def test_a_node_with_company_dials_only_lost_initial_peers_and_rarely() -> None:
    a = attempts("a", "b")
    assert a.due(0.0, ["b"], [address("c")]) == [address("a")]
    a.report(address("a"), Result.UNREACHABLE, 0.0, lonely=False)
    assert a.due(100.0, ["b"], []) == []
    assert a.due(451.0, ["b"], []) == [address("a")]


def test_pauses_double_up_to_a_bound_while_the_node_is_alone() -> None:
    a, now, pauses = attempts("a"), 0.0, []
    for _ in range(12):
        a.report(address("a"), Result.UNREACHABLE, now, lonely=True)
        start = now
        while not a.due(now, [], []):
            now += 0.1
        pauses.append(now - start)
    assert 0.4 < pauses[0] < 1.7
    assert max(pauses) <= 1.5 * bootstrap.LONELY_PAUSE_SECONDS + 0.2
    assert min(pauses[-3:]) >= 0.5 * bootstrap.LONELY_PAUSE_SECONDS - 0.2


def test_a_node_that_lost_everyone_dials_at_once() -> None:
    a = attempts("a")
    a.report(address("a"), Result.CONNECTED, 0.0, lonely=False)
    assert a.due(1.0, [], []) == []
    a.lost_everyone()
    assert a.due(1.0, [], []) == [address("a")]


def test_each_outcome_is_news_once() -> None:
    a = attempts("a")
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
    cached = [address(f"p{i}") for i in range(1000)]
    assert len(a.due(0.0, [], cached)) == bootstrap.MAX_AT_ONCE
    for one in cached:
        a.report(one, Result.UNREACHABLE, 0.0, lonely=True)
    assert len(a._attempts) <= 4 * bootstrap.MAX_CACHED


def test_the_reason_told_is_that_of_the_address_dialled() -> None:
    reason = "connect: all dials failed * [/ip4/127.0.0.1/tcp/2] peer id mismatch: x * [/ip4/127.0.0.1/tcp/1] refused"
    outcome = explain_failure(address("a"), reason)
    assert outcome.result is Result.UNREACHABLE
    assert "(refused)" in outcome.message


# Real nodes


class Joining:
    """A node's bootstrap at work, and what it told."""

    def __init__(self, bootstrap: Bootstrap, told: list[Outcome]) -> None:
        self.bootstrap, self.told = bootstrap, told


async def start(loopback: Loopback, name: str, initial: list[str], book: PeerBook | None = None) -> Joining:
    network = await loopback.start(name)
    dht = await SwarmDHT.start(network, "test")
    loopback.stack.push_async_callback(dht.close)
    told: list[Outcome] = []
    made = Bootstrap(network, dht, initial, book or PeerBook(), told.append)
    task = asyncio.create_task(made.run())

    async def stop() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    loopback.stack.push_async_callback(stop)
    return Joining(made, told)


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
        network = await loopback.start("a", listen=[f"/ip4/127.0.0.1/tcp/{port}"])
        dht = await SwarmDHT.start(network, "test")
        loopback.stack.push_async_callback(dht.close)
        await until(lambda: node.bootstrap.state is JoinState.JOINED, 40.0)
        assert node.bootstrap._dht.neighbours() == 1
        assert [o.result for o in node.told] == [Result.UNREACHABLE, Result.CONNECTED]

    on_loopback(body)


def test_a_wrong_peer_id_is_told_by_name(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        other = await loopback.start("a")
        target = (await loopback.address_of(other)).replace(other.peer_id, loopback.identity("x").peer_id)
        node = await start(loopback, "b", [target])
        await until(lambda: node.told, 5.0)
        assert node.told[0].result is Result.WRONG_PEER_ID
        assert "another key" in node.told[0].message
        assert node.bootstrap.state is JoinState.ALONE

    on_loopback(body)


def test_cached_peers_stand_in_for_a_dead_bootstrap(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        first = await start(loopback, "a", [])
        known = PeerBook()
        network = first.bootstrap._network
        known.saw(network.peer_id, [(await loopback.address_of(network)).partition("/p2p/")[0]], time.time())
        dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{loopback.identity('x').peer_id}"
        node = await start(loopback, "b", [dead], known)
        await until(lambda: node.bootstrap.state is JoinState.JOINED, 5.0)
        assert {o.result for o in node.told} == {Result.CONNECTED, Result.UNREACHABLE}

    on_loopback(body)


def test_a_node_whose_p2pd_died_does_not_raise(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        node = await start(loopback, "b", [address(loopback.identity("x").peer_id)])
        await node.bootstrap._network.close()
        await node.bootstrap._step()
        assert node.bootstrap.state is JoinState.ALONE

    on_loopback(body)
