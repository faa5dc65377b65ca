"""The DHT over real p2pd processes: records are stored and read, attacks are refused, and its pure parts by themselves.

The attacker is a network of its own that speaks hivemind's calls directly and keeps no rule.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from sapo_node.identity import Identity
from sapo_node.rollouts import codec
from sapo_node.rollouts.schema import Announcement, Listing
from sapo_node.swarm import dht as dht_module
from sapo_node.swarm import protocol, records
from sapo_node.swarm.dht import StrictSerializer, SwarmDHT, decode_dictionary, record_key, shard_prefix
from sapo_node.swarm.hivemind_light import DHTID, DHTProtocol, PeerID, dht_pb2
from sapo_node.swarm.p2p import Network, NetworkError
from sapo_node.swarm.records import Record, RecordStore, RecordValidator, Refused, ShardSchedule, key_id

SWARM = "test"


def announcement(identity: Identity, epoch: int, k: int = 0, seq: int = 1, **changes: Any) -> Announcement:
    plain = Announcement(
        proto=protocol.PROTO,
        swarm=SWARM,
        epoch=epoch,
        k=k,
        prefix=shard_prefix(identity.public_key, epoch, k),
        seq=seq,
        created_at=epoch * 30.0,
        version="0.1.0",
        roles=["trainer"],
        addresses=["/ip4/127.0.0.1/tcp/1"],
        batches=[Listing(content_id=bytes(32), size=1000, groups=4, created_at=epoch * 30.0)],
    )
    return msgspec.structs.replace(plain, **changes)


def envelope(identity: Identity, epoch: int, k: int = 0, seq: int = 1, **changes: Any) -> bytes:
    return codec.encode_announcement(announcement(identity, epoch, k, seq, **changes), identity)


def epoch_now() -> int:
    return protocol.epoch_of(time.time())


# In a fresh interpreter

LIGHT = """
import sys, time
began = time.perf_counter()
from sapo_node.swarm import hivemind_light
took = time.perf_counter() - began
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert not [m for m in sys.modules if m in hivemind_light._STAND_INS], "the stand-ins are gone again"
assert hivemind_light.P2PD.is_file()
import asyncio, uvloop
from pathlib import Path
from sapo_node.identity import Identity
from sapo_node.swarm.dht import SwarmDHT
from sapo_node.swarm.p2p import Network
async def main():
    folder = Path(sys.argv[1])
    network = await Network.start(Identity.create(folder / "k"), work_dir=folder, listen=["/ip4/127.0.0.1/tcp/0"])
    dht = await SwarmDHT.start(network, "test")
    await dht.close()
    await network.close()
uvloop.run(main())
assert "torch" not in sys.modules
print(took)
"""


def test_hivemind_comes_without_torch_and_quickly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIGHT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.5


def test_another_hivemind_version_is_refused_with_the_cure() -> None:
    code = "import importlib.metadata as m; m.version = lambda name: '1.2.0'\nimport sapo_node.swarm.hivemind_light"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "hivemind 1.2.0 is installed, but sapo-node imports parts of exactly 1.1.12; run: pip install" in done.stderr


# Where records lie


def test_prefix_is_the_first_bits_of_a_digest_and_changes_with_the_epoch() -> None:
    key = bytes(range(32))
    bits = f"{int.from_bytes(protocol.digest(key, (7).to_bytes(8, 'big')), 'big'):0256b}"
    assert [shard_prefix(key, 7, k) for k in (0, 1, 5, 16)] == [0, *(int(bits[:k], 2) for k in (1, 5, 16))]
    assert shard_prefix(key, 7, 16) != shard_prefix(key, 8, 16)


def test_key_id_is_hiveminds_hash_of_the_key() -> None:
    assert record_key("s", 1, 2, 3) == "sapo/1/s/1/2/3"
    assert key_id("s", 1, 2, 3) == DHTID.generate(source="sapo/1/s/1/2/3").to_bytes()


# Which records are valid


class Clock:
    def __init__(self, epoch: int) -> None:
        self.time = epoch * 30.0 + 1

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def key(tmp_path: Path) -> Identity:
    return Identity.create(tmp_path / "key")


def test_valid_record_is_accepted(key: Identity) -> None:
    validator = RecordValidator(SWARM, Clock(100))
    data = envelope(key, 100, k=3, seq=5)
    place = key_id(SWARM, 100, 3, shard_prefix(key.public_key, 100, 3))
    for _ in range(2):  # the second from memory
        record = validator.validate(place, key.public_key, data, 101 * 30.0)
        assert (record.envelope, record.announcement.seq) == (data, 5)


def refused(
    key: Identity, data: bytes, *, at: tuple[int, int, int] = (100, 0, 0), signer: bytes = b"", expiry: float = 3100.0
) -> str:
    validator = RecordValidator(SWARM, Clock(100))
    with pytest.raises(Refused) as first:
        validator.validate(key_id(SWARM, *at), signer or key.public_key, data, expiry)
    with pytest.raises(Refused) as second:
        validator.validate(key_id(SWARM, *at), signer or key.public_key, data, expiry)
    assert str(first.value) == str(second.value)
    return str(first.value)


def test_invalid_records_are_refused(key: Identity, tmp_path: Path) -> None:
    good = envelope(key, 100)
    other = Identity.create(tmp_path / "other")
    assert "another key" in refused(key, good, signer=other.public_key)
    assert "20-byte key" in refused(key, good, signer=b"short")
    assert "another place" in refused(key, good, at=(101, 0, 0))
    assert "another place" in refused(key, good, at=(100, 1, 0))
    assert "signature" in refused(key, good[:-1] + bytes([good[-1] ^ 1]))
    assert "too large" in refused(key, good + bytes(1024))
    assert "epoch to come" in refused(key, envelope(key, 102), at=(102, 0, 0))
    for expiry in (float("nan"), float("inf"), 111 * 30.0 + 1, 3000.0, -1.0):
        assert "expired or would stay too long" in refused(key, good, expiry=expiry)
    wrong_half = 1 - shard_prefix(key.public_key, 100, 1)
    assert "not in its signer's shard" in refused(
        key, envelope(key, 100, 1, prefix=wrong_half), at=(100, 1, wrong_half)
    )
    assert refused(key, b"")


def test_memory_of_signatures_is_bounded(key: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_MEMO_ENTRIES", 4)
    validator = RecordValidator(SWARM, Clock(100))
    for number in range(10):
        with pytest.raises(Refused):
            validator.validate(bytes(20), key.public_key, b"%d" % number, 3100.0)
    assert len(validator._memo) == 4


# What a holder keeps


def record(signer: bytes, seq: int = 1, expires_at: float = 3100.0, size: int = 100) -> Record:
    a = Announcement(
        proto=1, swarm=SWARM, epoch=100, k=0, prefix=0, seq=seq, created_at=0.0, version="", roles=[], addresses=[],
        batches=[],
    )  # fmt: skip
    return Record(signer, bytes(size), expires_at, a)


def signer(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_signers_count_decides_which_record_stays() -> None:
    store = RecordStore(b"own", Clock(100))
    assert store.store(b"k", record(b"a", seq=2))
    assert not store.store(b"k", record(b"a", seq=2)), "the same again is no news"
    assert not store.store(b"k", record(b"a", seq=1, expires_at=3200.0)), "an older one with a later expiry"
    assert store.store(b"k", record(b"a", seq=2, expires_at=3200.0))
    assert store.store(b"k", record(b"a", seq=3, expires_at=3050.0)), "newer, although it expires earlier"
    assert [r.announcement.seq for r in store.get(b"k")] == [3]


def test_one_signer_cannot_fill_the_store() -> None:
    store = RecordStore(b"own", Clock(100))
    taken = sum(store.store(b"key %d" % i, record(b"greedy")) for i in range(1000))
    assert taken == records.MAX_RECORDS_OF_SIGNER
    assert store.store(b"key 999", record(b"modest"))


def fill(store: RecordStore, signers: range) -> None:
    for i in signers:
        store.store(b"k", record(signer(i)))


def held(store: RecordStore) -> set[bytes]:
    return {r.public_key for r in store.get(b"k")}


def test_a_flood_ahead_of_the_others_locks_nobody_out_for_sure() -> None:
    store = RecordStore(b"own", Clock(100))
    flood, honest = range(protocol.MAX_SUBKEYS), range(1000, 1000 + protocol.MAX_SUBKEYS)
    fill(store, flood)
    fill(store, honest)
    kept = held(store) & {signer(i) for i in honest}
    assert 64 < len(kept) < 192, "about half, by the draw"


def test_who_stays_does_not_depend_on_who_came_first() -> None:
    one, other = RecordStore(b"own", Clock(100)), RecordStore(b"own", Clock(100))
    other._secret = one._secret
    fill(one, range(600))
    fill(other, range(599, -1, -1))
    assert held(one) == held(other)


def test_each_holder_draws_anew() -> None:
    one, other = RecordStore(b"own", Clock(100)), RecordStore(b"own", Clock(100))
    fill(one, range(600))
    fill(other, range(600))
    assert held(one) != held(other)


def test_full_key_takes_updates_and_own_records() -> None:
    store = RecordStore(b"own", Clock(100))
    fill(store, range(protocol.MAX_SUBKEYS))
    assert store.store(b"k", record(signer(0), seq=2))
    assert store.store(b"k", record(b"own"))
    fill(store, range(1000, 3000))
    assert b"own" in held(store)
    assert len(store) == len(held(store)) == protocol.MAX_SUBKEYS, "not one more, or readers would pass one over"


def test_full_store_prefers_by_the_same_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORDS", 4)
    store = RecordStore(b"own", Clock(100))
    signers_of = [signer(i) for i in range(40)]
    for i, s in enumerate(signers_of):
        store.store(b"%d" % i, record(s))
    assert len(store) == 4
    best = sorted(signers_of, key=store._rank)[:4]
    assert {r.public_key for i in range(40) for r in store.get(b"%d" % i)} == set(best)
    assert store.store(b"k", record(b"own"))
    assert len(store) == 4
    assert {r.public_key for i in range(40) for r in store.get(b"%d" % i)} == set(best[:3])


def test_own_records_are_always_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORDS", 4)
    store = RecordStore(b"own", Clock(100))
    assert all(store.store(b"%d" % i, record(b"own")) for i in range(50))


def test_expired_records_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORDS", 1)
    clock = Clock(100)
    store = RecordStore(b"own", clock)
    first, last = sorted((b"a", b"b"), key=store._rank)
    assert store.store(b"k", record(first, expires_at=3010.0))
    assert not store.store(b"k", record(last))
    clock.time = 3011.0
    assert store.get(b"k") == []
    assert store.store(b"k", record(last))
    assert len(store) == 1


def test_expired_records_make_room_also_after_the_clock_was_set_back() -> None:
    clock = Clock(1000)
    store = RecordStore(b"own", clock)
    store.store(b"k", record(b"a", expires_at=clock.time + 60))  # sweeps
    clock.time -= 3600
    store.store(b"k", record(b"b", expires_at=clock.time + 10))
    clock.time += 11
    store.store(b"k", record(b"c", expires_at=clock.time + 60))
    assert len(store) == 2


# Which shard


def sizes(**records: int) -> list[int]:
    """Records in a shard of each k, by `k3=40`."""
    return [records.get(f"k{k}", 0) for k in range(protocol.MAX_SHARD_BITS + 1)]


def test_newcomer_takes_the_k_of_the_swarm() -> None:
    schedule = ShardSchedule()
    schedule.probed(sizes(k3=40))
    assert (schedule.k, schedule.readable()) == (3, [2, 3, 4])


def test_newcomer_of_a_small_swarm_takes_the_fullest_shard() -> None:
    schedule = ShardSchedule()
    schedule.probed(sizes(k0=5, k9=1))
    assert schedule.k == 0
    assert not schedule.new


def test_first_node_of_a_swarm_settles_at_0_and_is_no_newcomer_when_it_meets_others() -> None:
    schedule = ShardSchedule()
    schedule.probed(sizes())
    assert (schedule.k, schedule.readable(), schedule.new) == (0, [0, 1], True)
    schedule.probed(sizes(k4=30))
    assert (schedule.k, schedule.new) == (4, False)


def test_every_k_is_looked_at_again_after_some_epochs() -> None:
    schedule = ShardSchedule()
    for epochs in range(1, 3 * records.PROBE_EPOCHS + 1):
        schedule.end_of_epoch([20])
        assert schedule.due() == (epochs % records.PROBE_EPOCHS == 0)
        if schedule.due():
            schedule.probed(sizes(k0=20))


def test_k_follows_the_median_by_one_bit_an_epoch() -> None:
    schedule = ShardSchedule()
    seen = ([64], [65], [500, 500, 1], [17, 16], [15, 400, 3], [], [0], [0])
    assert [schedule.end_of_epoch(shards) for shards in seen] == [0, 1, 2, 2, 1, 1, 0, 0]


def test_halves_of_a_split_shard_do_not_merge_again() -> None:
    assert protocol.SHARD_SPLIT_ABOVE // 2 >= protocol.SHARD_MERGE_BELOW


def test_forced_k_never_moves() -> None:
    schedule = ShardSchedule(2)
    schedule.probed(sizes(k9=500))
    assert (schedule.new, schedule.end_of_epoch([1000]), schedule.end_of_epoch([0])) == (False, 2, 2)
    assert not schedule.due()
    assert schedule.readable() == [1, 2, 3]
    with pytest.raises(ValueError, match="between 0 and 16"):
        ShardSchedule(17)


# What is decoded


def nested_extensions(depth: int) -> bytes:
    data = b"\xc0"
    for _ in range(depth):
        data = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + data))
    return data


@pytest.mark.parametrize(
    "data",
    [nested_extensions(400), b"\x91" * 900 + b"\xc0", b"\xd9\x01a", b"\xc0", b"", b"\xc4\xff", bytes(2000), b"\x93"],
)
def test_decoders_refuse_everything_but_bytes_and_flat_dictionaries(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the decoder's wording is its own
        StrictSerializer.loads(data)
    with pytest.raises(ValueError):  # noqa: PT011
        decode_dictionary(data)
    with pytest.raises(ValueError):  # noqa: PT011
        decode_dictionary(msgpack.packb(msgpack.ExtType(0x50, data)))


def test_dictionary_is_hiveminds_own(key: Identity) -> None:
    expires_at = time.time() + 60
    ours = record(key.public_key, expires_at=expires_at)
    theirs = DHTProtocol.serializer.loads(dht_module.encode_dictionary([ours]))
    item = (key.public_key, StrictSerializer.dumps(ours.envelope), expires_at)
    assert [(k, v, e) for k, (v, e) in theirs.items()] == [item]
    assert decode_dictionary(DHTProtocol.serializer.dumps(theirs)) == [item]


# Real nodes


class Node:
    """One node of the swarm: its key, its network, its DHT."""

    def __init__(self, identity: Identity, network: Network, dht: SwarmDHT) -> None:
        self.identity, self.network, self.dht = identity, network, dht

    async def announce(self, epoch: int, k: int, seq: int = 1, seconds: float = 60.0) -> bool:
        prefix = shard_prefix(self.identity.public_key, epoch, k)
        data = envelope(self.identity, epoch, k, seq)
        return await self.dht.announce(data, epoch, k, prefix, time.time() + seconds)


async def start_dht(loopback: Any, name: str, first: Node | None, **options: Any) -> Node:
    network = await loopback.start(name)
    peers = [await loopback.address_of(first.network)] if first else []
    dht = await SwarmDHT.start(network, SWARM, peers, **options)
    loopback.stack.push_async_callback(dht.close)
    return Node(loopback.identity(name), network, dht)


async def start_swarm(loopback: Any, names: str, **options: Any) -> list[Node]:
    nodes: list[Node] = []
    async with asyncio.timeout(30):
        for name in names:
            nodes.append(await start_dht(loopback, name, nodes[0] if nodes else None, **options))
            # Who called a node enters its table only after answering a ping; one that joins before that is not told.
            await has_neighbours(nodes[0], len(nodes) - 1)
        for node in nodes:
            await has_neighbours(node, len(names) - 1)
    return nodes


async def has_neighbours(node: Node, count: int) -> None:
    while node.dht.neighbours() != count:
        await asyncio.sleep(0.02)


def signers(envelopes: list[bytes]) -> list[bytes]:
    return sorted(codec.open_announcement(data, SWARM)[0] for data in envelopes)


def test_every_node_reads_what_every_node_announced(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        nodes = await start_swarm(loopback, "abcd")
        assert all(node.dht.neighbours() == 3 for node in nodes)
        epoch = epoch_now()
        assert all([await node.announce(epoch, 0) for node in nodes])
        everyone = sorted(node.identity.public_key for node in nodes)
        for node in nodes:
            assert signers(await node.dht.read(epoch, 0, 0)) == everyone
            assert await node.dht.read(epoch - 1, 0, 0) == []

    on_loopback(body)


@pytest.mark.slow
def test_forced_k_spreads_the_nodes_over_shards(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        nodes = await start_swarm(loopback, "abcd", forced_k=2)
        epoch = epoch_now()
        assert all([await node.announce(epoch, node.dht.schedule.k) for node in nodes])
        for prefix in range(4):
            expected = sorted(
                node.identity.public_key for node in nodes if shard_prefix(node.identity.public_key, epoch, 2) == prefix
            )
            assert signers(await nodes[0].dht.read(epoch, 2, prefix)) == expected
        assert await nodes[0].dht.read(epoch, 0, 0) == []

    on_loopback(body)


def hold(node: Node, identity: Identity, epoch: int, k: int) -> None:
    """Let a node hold a valid announcement of another."""
    key = key_id(SWARM, epoch, k, shard_prefix(identity.public_key, epoch, k))
    held, data = node.dht._protocol, envelope(identity, epoch, k)
    assert held.records.store(key, held.validator.validate(key, identity.public_key, data, (epoch + 4) * 30.0))


@pytest.mark.slow
def test_newcomer_finds_the_swarms_k(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        first = await start_dht(loopback, "a", None, forced_k=2)
        epoch = epoch_now()
        for number in range(40):  # the newcomer looks into a random shard: hardly one of the four is empty
            for e in (epoch, epoch + 1):
                hold(first, loopback.identity(f"n{number}"), e, 2)
        second = await start_dht(loopback, "b", first)
        assert second.dht.schedule.k == 2

    on_loopback(body)


def test_a_rewritten_announcement_replaces_the_old_one(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        nodes = await start_swarm(loopback, "abc")
        epoch = epoch_now()
        assert await nodes[0].announce(epoch, 0, seq=1, seconds=60)
        assert await nodes[0].announce(epoch, 0, seq=2, seconds=61)
        assert not await nodes[0].announce(epoch, 0, seq=1, seconds=62), "older"
        (data,) = await nodes[1].dht.read(epoch, 0, 0)
        assert codec.open_announcement(data, SWARM)[1].seq == 2

    on_loopback(body)


def test_own_mistakes_are_errors(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        node = await start_dht(loopback, "a", None)
        epoch = epoch_now()
        data = envelope(node.identity, epoch)
        with pytest.raises(ValueError, match="made for another place"):
            await node.dht.announce(data, epoch + 1, 0, 0, time.time() + 60)
        with pytest.raises(ValueError, match="would stay too long"):
            await node.dht.announce(data, epoch, 0, 0, time.time() + 1000)

    on_loopback(body)


@pytest.mark.slow
def test_alone_then_joined_when_the_bootstrap_appears(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        first = await loopback.start("a")
        address = await loopback.address_of(first)
        await first.close()
        alone = await start_dht(loopback, "b", None)
        assert await alone.dht.join([address]) == 0
        assert await alone.announce(epoch_now(), 0), "alone, its own store is the DHT"
        again = await loopback.start("a", listen=[address.partition("/p2p/")[0]])
        other = await SwarmDHT.start(again, SWARM)
        loopback.stack.push_async_callback(other.close)
        async with asyncio.timeout(15):  # p2pd pauses before it dials a dead address again
            while not await alone.dht.join([address]):
                await asyncio.sleep(0.2)
        assert alone.dht.neighbours() == other.neighbours() == 1
        epoch = epoch_now()
        assert await alone.announce(epoch, 0, seq=2, seconds=61)
        assert len(await other.read(epoch, 0, 0)) == 1
        assert await alone.dht.join([first.peer_id]) == 1, "a bare id, when connected"

    on_loopback(body)


@pytest.mark.slow
def test_reading_and_announcing_survive_a_dead_holder(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        nodes = await start_swarm(loopback, "abcd")
        epoch = epoch_now()
        assert all([await node.announce(epoch, 0) for node in nodes])
        os.kill(nodes[0].network.daemon.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            assert len(await nodes[1].dht.read(epoch, 0, 0)) == 4
            assert await nodes[1].announce(epoch, 0, seq=2, seconds=61)
        with pytest.raises(NetworkError, match="read the DHT: p2pd ended"):
            await nodes[0].dht.read(epoch, 0, 0)

    on_loopback(body)


@pytest.mark.slow
def test_hung_holder_delays_a_reading_but_does_not_empty_it(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        nodes = await start_swarm(loopback, "abc")
        epoch = epoch_now()
        assert all([await node.announce(epoch, 0) for node in nodes])
        await loopback.freeze(nodes[0].network)
        started = time.monotonic()
        try:
            assert len(await nodes[1].dht.read(epoch, 0, 0)) == 3
            assert time.monotonic() - started < dht_module.OPERATION_SECONDS
            started = time.monotonic()
            assert len(await nodes[1].dht.read(epoch, 0, 0)) == 3
            assert time.monotonic() - started < 1, "the second reading leaves it out"
        finally:
            os.kill(nodes[0].network.daemon.pid, signal.SIGCONT)

    on_loopback(body)


def test_node_that_does_not_store_for_others_still_reads_and_announces(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        first = await start_dht(loopback, "a", None)
        guest = await start_dht(loopback, "b", first, store_for_others=False)
        epoch = epoch_now()
        assert await guest.announce(epoch, 0)
        assert await first.announce(epoch, 0)
        assert len(await first.dht.read(epoch, 0, 0)) == len(await guest.dht.read(epoch, 0, 0)) == 2
        assert (first.dht.neighbours(), guest.dht.neighbours()) == (0, 1)

    on_loopback(body)


def test_denied_peer_can_neither_store_nor_read(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        a, b = await start_swarm(loopback, "ab")
        epoch = epoch_now()
        a.network.denied = {b.network.peer_id}.__contains__
        assert await a.announce(epoch, 0)
        await b.announce(epoch, 0)
        assert len(a.dht._protocol.records) == 1
        assert signers(await b.dht.read(epoch, 0, 0)) == [b.identity.public_key]
        assert signers(await a.dht.read(epoch, 0, 0)) == [a.identity.public_key]

    on_loopback(body)


# Attacks


class Attacker:
    """Speaks hivemind's calls to one holder without any of our checks."""

    def __init__(self, identity: Identity, network: Network, protocol_: Any, victim: Node) -> None:
        self.identity, self.network, self.protocol = identity, network, protocol_
        self.victim = victim
        self.victim_id = PeerID.from_base58(victim.network.peer_id)

    @classmethod
    async def start(cls, loopback: Any, victim: Node) -> "Attacker":
        network = await loopback.start("attacker")
        await network.connect(await loopback.address_of(victim.network))
        raw = await DHTProtocol.create(network.p2p, DHTID.generate(), 20, 5, 5, 3.0, client_mode=True)
        return cls(loopback.identity("attacker"), network, raw, victim)

    async def store(self, key: bytes, subkey: bytes, value: bytes, seconds: float = 60.0) -> list[bool] | None:
        """The holder's answer to a raw store; None for an error."""
        request = dht_pb2.StoreRequest(
            keys=[key], subkeys=[subkey], values=[value], expiration_time=[time.time() + seconds], in_cache=[False]
        )
        try:
            response = await self.protocol.get_stub(self.victim_id).rpc_store(request, timeout=5.0)
        except Exception:  # noqa: BLE001  any error is a refusal here
            return None
        return list(response.store_ok)


def packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True))


async def attack_and_check(loopback: Any, attack: Callable[[Attacker, int, bytes], Any]) -> None:
    """Run an attack on the holders of a shard: all refuse, and afterwards everybody reads the two honest records."""
    nodes = await start_swarm(loopback, "ab")
    epoch = epoch_now()
    assert all([await node.announce(epoch, 0) for node in nodes])
    attacker = await Attacker.start(loopback, nodes[0])
    answers = await attack(attacker, epoch, key_id(SWARM, epoch, 0, 0))
    assert answers
    assert all(answer in (None, [False]) for answer in answers), answers
    for node in nodes:
        async with asyncio.timeout(5):
            found = signers(await node.dht.read(epoch, 0, 0))
        assert found == sorted(node.identity.public_key for node in nodes)
        assert len(node.dht._protocol.records) == 2
        assert await node.network.peers()
    # The control: the same call with nothing wrong about it is taken.
    honest = packed(envelope(attacker.identity, epoch))
    key = key_id(SWARM, epoch, 0, 0)
    assert await attacker.store(key, packed(attacker.identity.public_key), honest) == [True]


async def plain_value(a: Attacker, epoch: int, key: bytes) -> Any:
    good = packed(envelope(a.identity, epoch))
    return [await a.store(key, subkey, good, 200) for subkey in (packed(None), b"")]


async def odd_subkeys(a: Attacker, epoch: int, key: bytes) -> Any:
    good = packed(envelope(a.identity, epoch))
    subkeys = [
        packed("x" * 32),
        packed(7),
        packed(b"short"),
        packed([b"x" * 32]),
        packed(a.identity.public_key) + b"\0",
    ]
    return [await a.store(key, subkey, good) for subkey in subkeys]


async def foreign_subkey(a: Attacker, epoch: int, key: bytes) -> Any:
    """Over the victim's own record: the attacker's signature, and the victim's envelope with bytes changed."""
    victim = a.victim.identity
    forged = bytearray(envelope(victim, epoch, seq=9))
    forged[-1] ^= 1
    values = [envelope(a.identity, epoch), bytes(forged)]
    return [await a.store(key, packed(victim.public_key), packed(value), 200) for value in values]


async def far_expiry(a: Attacker, epoch: int, key: bytes) -> Any:
    own = packed(a.identity.public_key)
    good = packed(envelope(a.identity, epoch))
    return [await a.store(key, own, good, seconds) for seconds in (400.0, 3e9, float("inf"), float("nan"), -5.0)]


async def replay(a: Attacker, epoch: int, key: bytes) -> Any:
    """An honest record under another epoch, another k, and an old one with a later expiry over the present one."""
    victim = a.victim.identity
    old = packed(envelope(victim, epoch, seq=0))
    places = [(epoch + 1, 0, 0), (epoch - 1, 0, 0), (epoch, 1, 0), (epoch, 1, 1)]
    answers = [await a.store(key_id(SWARM, *place), packed(victim.public_key), old, 100) for place in places]
    return [*answers, await a.store(key, packed(victim.public_key), old, 200)]


async def hostile_msgpack(a: Attacker, epoch: int, key: bytes) -> Any:
    own = packed(a.identity.public_key)
    bombs = [
        nested_extensions(200),
        nested_extensions(2000),
        b"\x91" * 100_000 + b"\xc0",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
    ]
    as_values = [await a.store(key, own, bomb) for bomb in bombs]
    as_subkeys = [await a.store(key, bomb, packed(envelope(a.identity, epoch))) for bomb in bombs]
    as_dictionaries = [await a.store(key, b"", msgpack.packb(msgpack.ExtType(0x50, bomb))) for bomb in bombs]
    return as_values + as_subkeys + as_dictionaries


async def oversized(a: Attacker, epoch: int, key: bytes) -> Any:
    own = packed(a.identity.public_key)
    return [await a.store(key, own, packed(bytes(size))) for size in (1025, 100_000, 3_000_000)]


async def other_swarm(a: Attacker, epoch: int, key: bytes) -> Any:
    value = packed(envelope(a.identity, epoch, swarm="other"))
    own = packed(a.identity.public_key)
    return [await a.store(key, own, value), await a.store(key_id("other", epoch, 0, 0), own, value)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [plain_value, odd_subkeys, foreign_subkey, far_expiry, replay, hostile_msgpack, oversized, other_swarm],
    ids=lambda attack: attack.__name__,
)
def test_attack_is_refused_and_reading_goes_on(on_loopback: Any, attack: Callable[..., Any]) -> None:
    on_loopback(lambda loopback: attack_and_check(loopback, attack))


def test_too_many_keys_in_one_call_are_refused(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        node = await start_dht(loopback, "a", None)
        attacker = await Attacker.start(loopback, node)
        stub = attacker.protocol.get_stub(attacker.victim_id)
        for call, request in {
            stub.rpc_find: dht_pb2.FindRequest(keys=[os.urandom(20)] * 10_000),
            stub.rpc_store: dht_pb2.StoreRequest(
                keys=[bytes(20)] * 10_000, subkeys=[b""] * 10_000, values=[b""] * 10_000, expiration_time=[0.0] * 10_000
            ),
        }.items():
            with pytest.raises(Exception, match="at most 8"):
                await call(request, timeout=5.0)

    on_loopback(body)


class HostileHolder(dht_module.RecordProtocol):
    """A node of the swarm that answers searches with whatever a test plants."""

    answer: bytes = b""
    peers: tuple[bytes, ...] = ()

    async def rpc_find(self, request: dht_pb2.FindRequest, context: Any) -> dht_pb2.FindResponse:
        result = dht_pb2.FindResult(
            type=dht_pb2.FOUND_DICTIONARY,
            value=self.answer,
            expiration_time=float("inf"),
            nearest_node_ids=[bytes(20) for _ in self.peers],
            nearest_peer_ids=self.peers,
        )
        return dht_pb2.FindResponse(results=[result] * len(request.keys), peer=self.node_info)


def hostile_answers(epoch: int, identity: Identity) -> dict[str, bytes]:
    def dictionary(*items: Any) -> bytes:
        return packed(msgpack.ExtType(0x50, packed([0, float("inf"), list(items)])))

    good = [identity.public_key, packed(envelope(identity, epoch)), time.time() + 60]
    return {
        "nothing": b"",
        "nested extensions": nested_extensions(400),
        "nested dictionary": packed(msgpack.ExtType(0x50, nested_extensions(400))),
        "mixed subkeys": dictionary(good, ["text", good[1], good[2]]),
        "megabytes": dictionary([bytes(32), bytes(3_000_000), 1.0]),
        "bad beside good": dictionary([bytes(32), packed(b"junk"), good[2]], good),
    }


@pytest.mark.slow
def test_hostile_holder_neither_hangs_crashes_nor_hides_others(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        a, b = await start_swarm(loopback, "ab")
        epoch = epoch_now()
        assert all([await node.announce(epoch, 0) for node in (a, b)])
        honest = sorted(node.identity.public_key for node in (a, b))
        network = await loopback.start("h")
        stores = RecordStore(network.public_key), RecordValidator(SWARM)
        holder = await HostileHolder.start(network, *stores, serve=True)
        holder.peers = tuple(os.urandom(38) for _ in range(5))  # neighbours that do not exist
        await network.connect(await loopback.address_of(a.network))
        h_id = PeerID.from_base58(a.network.peer_id)
        for name, answer in hostile_answers(epoch, loopback.identity("h")).items():
            holder.answer = answer
            assert await holder.call_ping(h_id) is not None
            await asyncio.sleep(0.05)
            assert a.dht.neighbours() == 2, "it is among those asked"
            async with asyncio.timeout(dht_module.OPERATION_SECONDS):
                found = signers(await a.dht.read(epoch, 0, 0))
            extra = [loopback.identity("h").public_key] if name == "bad beside good" else []
            assert found == sorted(honest + extra), name
            a.dht._suspended.clear()
        await holder.shutdown()

    on_loopback(body)


def test_nobody_takes_another_place_in_the_routing_table(on_loopback: Any) -> None:
    async def body(loopback: Any) -> None:
        node = await start_dht(loopback, "a", None)
        attacker = await Attacker.start(loopback, node)
        for _ in range(5):  # many places for one peer
            info = dht_pb2.NodeInfo(node_id=DHTID.generate().to_bytes())
            await attacker.protocol.get_stub(attacker.victim_id).rpc_ping(dht_pb2.PingRequest(peer=info), timeout=5.0)
        assert node.dht.neighbours() == 0

    on_loopback(body)
