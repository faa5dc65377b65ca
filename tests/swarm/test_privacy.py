"""A node serves what it wrote itself, and nothing of others."""

import time
from typing import Any

import pytest

from sapo_node.swarm import fetch, protocol
from sapo_node.swarm.discovery import Shard
from sapo_node.swarm.fetch import FetchFailed
from tests.swarm.conftest import Loopback
from tests.swarm.test_exchange import join, make_batch, until


def test_what_a_node_fetched_is_neither_announced_nor_served_on(on_loopback: Any) -> None:
    async def body(loopback: Loopback) -> None:
        a = await join(loopback, "a", want=0)
        b = await join(loopback, "b", a)
        await a.exchange.publish(make_batch(a.identity))
        now = time.time()
        (listing,) = a.exchange._shelf.newest(now)
        hint = a.exchange._sign(Shard(protocol.epoch_of(now), 0, 0), now, await a.network.addresses())
        b.exchange._take_hint(a.identity.peer_id, hint)
        await until(lambda: b.received, 5.0)
        assert b.received[0].opened.content_id == listing.content_id

        assert b.exchange._shelf.newest(now) == []
        with pytest.raises(FetchFailed) as refused:
            await fetch.ask(*await a.network.open_stream(b.identity.peer_id, protocol.FETCH_PROTOCOL), listing)
        assert refused.value.gone
        served = await b.network.open_stream(a.identity.peer_id, protocol.FETCH_PROTOCOL)
        assert len(await fetch.ask(*served, listing)) == listing.size, "its author does serve it"

    on_loopback(body)
