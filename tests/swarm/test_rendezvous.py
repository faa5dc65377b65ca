"""Meeting in libp2p's public DHT: the schedule, and a closed network of our own in its place."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import cast

import pytest

from sapo_node.swarm import bootstrap, rendezvous
from sapo_node.swarm.dnsaddr import LookupFailed
from sapo_node.swarm.p2p import Network
from sapo_node.swarm.p2pd import NetworkError
from sapo_node.swarm.protocol import content_cid, rendezvous_name
from sapo_node.swarm.rendezvous import Rendezvous, Schedule
from sapo_node.swarm.secret import Secret
from tests.swarm.conftest import Loopback

OnLoopback = Callable[[Callable[[Loopback], Awaitable[None]]], None]


def test_the_content_id_is_the_swarms() -> None:
    assert content_cid(rendezvous_name("sapo"))[:4] == bytes([1, 0x55, 0x12, 32])
    assert len(content_cid(rendezvous_name("sapo"))) == 36
    assert content_cid(rendezvous_name("sapo")) != content_cid(rendezvous_name("sapo2"))


# When


def schedule() -> Schedule:
    return Schedule(random.Random(0))


def test_the_first_announcement_and_search_are_due_at_once() -> None:
    assert schedule().provide_due(0.0)
    assert schedule().find_due(0.0)


def test_an_announcement_is_repeated_each_hour() -> None:
    s = schedule()
    s.provided(0.0, True)
    assert not s.provide_due(0.7 * rendezvous.PROVIDE_SECONDS)
    assert s.provide_due(1.3 * rendezvous.PROVIDE_SECONDS)


def test_a_failed_announcement_is_repeated_soon_and_ever_later() -> None:
    s, now, pauses = schedule(), 0.0, []
    for _ in range(12):
        s.provided(now, False)
        start = now
        while not s.provide_due(now):
            now += 1.0
        pauses.append(now - start)
    assert pauses[0] < 2 * rendezvous.RETRY_SECONDS
    assert 0.7 * rendezvous.PROVIDE_SECONDS < pauses[-1] < 1.3 * rendezvous.PROVIDE_SECONDS


def test_a_lonely_node_searches_more_often_and_again_at_once_when_it_lost_everyone() -> None:
    s = schedule()
    s.searched(0.0, lonely=True)
    assert s.find_due(1.3 * rendezvous.LONELY_FIND_SECONDS)
    s.searched(0.0, lonely=False)
    assert not s.find_due(0.7 * rendezvous.FIND_SECONDS)
    s.lost_everyone()
    assert s.find_due(1.0)


# A closed network of libp2p hosts that serve the DHT, as the public one's do


async def public_network(loopback: Loopback) -> list[str]:
    """Four hosts; the addresses of two of them."""
    hosts = await loopback.swarm("pqrs", pubsub=False)
    return [await loopback.address_of(host) for host in hosts[:2]]


class Guest:
    """A node at the rendezvous, and whom it met."""

    def __init__(self, network: Network, swarm: str, entrances: list[str], *, lonely: bool = True) -> None:
        self.network = network
        self.met: set[str] = set()
        self.rendezvous = Rendezvous(network, swarm, entrances, self.met.update, lambda: lonely, no_names)


async def no_names(name: str) -> list[str]:
    raise LookupFailed(f"{name}: there is no name server here")


async def guest(loopback: Loopback, name: str, entrances: list[str], swarm: str = "test") -> Guest:
    made = Guest(await loopback.start(name, dht_client=True, pubsub=False), swarm, entrances)
    task = asyncio.create_task(made.rendezvous.run())

    async def stop() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    loopback.stack.push_async_callback(stop)
    return made


async def until(condition: Callable[[], object], seconds: float = 15.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.05)


def others(guest: Guest) -> set[str]:
    return {address.rpartition("/p2p/")[2] for address in guest.met} - {guest.network.peer_id}


@pytest.mark.slow
def test_two_nodes_without_an_address_of_each_other_meet(
    on_loopback: OnLoopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LONELY_FIND_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0.5)
    monkeypatch.setattr(rendezvous, "CHECK_SECONDS", 0.2)

    async def body(loopback: Loopback) -> None:
        first, second = await public_network(loopback)
        a, b = await guest(loopback, "a", [first]), await guest(loopback, "b", [second])
        stranger = await guest(loopback, "c", [first], swarm="elsewhere")
        await until(lambda: others(a) == {b.network.peer_id} and others(b) == {a.network.peer_id})
        assert await loopback.address_of(b.network) in a.met
        assert others(stranger) == set()
        assert a.rendezvous.provided == b.rendezvous.provided == 1

    on_loopback(body)


@pytest.mark.slow
def test_an_entrance_that_is_gone_is_stepped_over(on_loopback: OnLoopback, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0.5)

    async def body(loopback: Loopback) -> None:
        first, second = await public_network(loopback)
        dead = f"/ip4/127.0.0.1/tcp/1/p2p/{loopback.identity('x').peer_id}"
        named = f"/dnsaddr/nowhere.test/p2p/{loopback.identity('y').peer_id}"
        a = await guest(loopback, "a", [dead, named, second, first])
        await until(lambda: a.rendezvous.provided == 1)

    on_loopback(body)


def test_without_an_entrance_nothing_is_announced_and_nothing_raised(
    on_loopback: OnLoopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "CHECK_SECONDS", 0.1)

    async def body(loopback: Loopback) -> None:
        a = await guest(loopback, "a", [f"/ip4/127.0.0.1/tcp/1/p2p/{loopback.identity('x').peer_id}"])
        began = time.monotonic()
        await until(lambda: time.monotonic() - began > 1.0)
        assert a.rendezvous.provided == 0

    on_loopback(body)


def test_that_no_entrance_answers_is_told_once_and_by_name(
    on_loopback: OnLoopback, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(bootstrap, "FIRST_PAUSE_SECONDS", 0.1)

    async def body(loopback: Loopback) -> None:
        a = await guest(loopback, "a", [f"/dnsaddr/{name}.test/p2p/{loopback.identity('x').peer_id}" for name in "abc"])
        await until(lambda: len(a.rendezvous._failed) == 3)
        await asyncio.sleep(1.0)

    on_loopback(body)
    (told,) = [record.getMessage() for record in caplog.records if "no entrance answers" in record.getMessage()]
    assert "cannot be resolved: _dnsaddr." in told


def test_what_leads_farthest_is_met_first_and_every_peer_has_its_turn() -> None:
    inside = [f"/ip4/10.0.{i}.1/tcp/9" for i in range(7)]

    class Providers:
        peer_id = "me"

        @staticmethod
        def names(name: str) -> list[str]:
            return [name]

        async def find_providers(self, *_: object) -> list[tuple[str, list[str]]]:
            return [("a", [*inside, "/ip4/8.8.8.8/tcp/9"]), ("b", ["/ip4/127.0.0.1/tcp/9", "/ip4/9.9.9.9/tcp/9"])]

    met: list[str] = []
    made = Rendezvous(cast(Network, Providers()), "test", [], met.extend, lambda: True, no_names)
    asyncio.run(made._find(lonely=True))
    assert met[:2] == ["/ip4/8.8.8.8/tcp/9/p2p/a", "/ip4/9.9.9.9/tcp/9/p2p/b"]
    assert len(met) == rendezvous.MAX_ADDRESSES_EACH + 2


def test_a_private_swarm_meets_under_names_of_its_keys_alone() -> None:
    """Announced under the first, searched under all: the swarm may be changing its key."""
    secret = Secret([bytes(32), bytes([1]) * 32], "test")
    provided: list[bytes] = []
    searched: list[bytes] = []

    class Private:
        peer_id = "me"
        names = staticmethod(secret.names)

        async def provide(self, cid: bytes, _: float) -> None:
            provided.append(cid)

        async def find_providers(self, cid: bytes, *_: object) -> list[tuple[str, list[str]]]:
            searched.append(cid)
            return []

    made = Rendezvous(cast(Network, Private()), "test", [], print, lambda: True, no_names)
    asyncio.run(made._provide())
    asyncio.run(made._find(lonely=True))
    assert provided == searched[:1]
    assert len(set(searched)) == 2
    assert content_cid(rendezvous_name("test")) not in searched


def test_a_guest_does_not_serve_the_public_dht(on_loopback: OnLoopback) -> None:
    async def body(loopback: Loopback) -> None:
        client = await loopback.start("a", dht_client=True)
        asker = await loopback.start("b", dht_client=True)
        await asker.connect(await loopback.address_of(client))
        _, writer = await open_kad(asker, await loopback.start("c"), loopback)
        writer.close()
        with pytest.raises(NetworkError, match="protocols not supported"):
            await asker.open_stream(client.peer_id, "/ipfs/kad/1.0.0")

    on_loopback(body)


async def open_kad(
    asker: Network, server: Network, loopback: Loopback
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream of the DHT's protocol to a host that serves it."""
    await asker.connect(await loopback.address_of(server))
    return await asker.open_stream(server.peer_id, "/ipfs/kad/1.0.0")
