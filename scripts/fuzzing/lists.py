"""Lists of addresses and of problems, written by others: files, DNS records, data sets."""

from random import Random
from typing import Any, Final

import msgspec

from sapo_node.swarm import candidates, dnsaddr
from sapo_node.swarm import peers as peer_book
from sapo_node.swarm.addresses import is_multiaddr, reach
from sapo_node.tasks import dataset

from . import values
from .mutate import hostile, mutate, random_bytes, twist
from .run import Broken, Surface

_ADDRESS: Final = f"/ip4/192.0.2.7/tcp/4001/p2p/{values.OTHER.peer_id}"


def _file(name: str, data: bytes) -> Any:
    path = values.FOLDER / name
    path.write_bytes(data)
    return path


def _json(rng: Random, value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError):  # bytes and keys that JSON does not have
        return random_bytes(rng)


# Addresses


def _make_dns(rng: Random) -> bytes:
    lines = [f"dnsaddr={_ADDRESS}", "dnsaddr=/dnsaddr/a.example", "dnsaddr=/dns4/x.example/tcp/1/p2p/x", "v=spf1"]
    text = "\n".join(rng.choice(lines) for _ in range(rng.choice((1, 3, 6, 40)))).encode()
    return mutate(rng, text, text) if rng.random() < 0.8 else random_bytes(rng, 600)


def _read_dns(data: bytes) -> None:
    asked = 0

    async def lookup(_: str) -> list[str]:
        nonlocal asked
        asked += 1
        return data.decode(errors="replace").split("\n")

    found = values.LOOP.run_until_complete(dnsaddr.resolve("/dnsaddr/example.org", lookup))
    if asked > dnsaddr.MAX_LOOKUPS or len(found) > dnsaddr.MAX_ADDRESSES or not all(map(is_multiaddr, found)):
        raise Broken("a name cost too much, or stands for what is no address")
    for address in found:
        reach(address)


def _make_lines(rng: Random) -> bytes:
    lines = [_ADDRESS, "# a comment", "", "/dnsaddr/a.example", f"swarm {_ADDRESS}", f"fuzz {_ADDRESS}"]
    text = "\n".join(rng.choice(lines) for _ in range(rng.choice((1, 2, 4, 8)))).encode()
    if rng.random() < 0.5:
        text = f"# {candidates.PUBLIC_FORMAT}\n".encode() + text
    return mutate(rng, text, text) if rng.random() < 0.8 else random_bytes(rng, 600)


def _read_peers_file(data: bytes) -> None:
    found, faults = candidates.parse_peers_file(_file("peers.txt", data))
    if len(found) > candidates.MAX_LISTED or len(faults) > 3 or not all(map(is_multiaddr, found)):
        raise Broken("a file gave what is no address, or too many")


def _read_public_list(data: bytes) -> None:
    found = candidates.public_peers(values.SWARM, data.decode(errors="replace"))
    if len(found) > candidates.MAX_LISTED or not all(map(is_multiaddr, found)):
        raise Broken("the public list gave what is no address, or too many")


def _make_peers(rng: Random) -> bytes:
    record = peer_book.PeerRecord(peer_id=values.OTHER.peer_id, addresses=["/ip4/192.0.2.7/tcp/1"], score=3.0)
    value = {
        "version": 1,
        "peers": [msgspec.to_builtins(record)] * (300 if rng.random() < 0.01 else rng.choice((1, 2))),
    }
    if rng.random() < 0.6:
        value = twist(rng, value)
    data = _json(rng, value)
    return mutate(rng, data) if rng.random() < 0.4 else data


def _read_peers(data: bytes) -> None:
    found, told = peer_book.load_peers(_file("peers.json", data))
    if told is not None and found:
        raise Broken("a file that cannot be used was used")
    if len(found) > peer_book.MAX_SAVED or not all(is_multiaddr(a) for record in found for a in record.addresses):
        raise Broken("a file gave what is no address, or too many peers")
    peer_book.PeerBook(known=found).best(values.NOW)


# Problems


def _make_rows(rng: Random) -> bytes:
    rows: list[Any] = [{"question": f"What is {n} + {n}?", "answer": 2 * n} for n in range(rng.choice((1, 2, 3, 6)))]
    if rng.random() < 0.6:
        at = rng.randrange(len(rows))
        rows[at] = twist(rng, rows[at]) if rng.random() < 0.7 else hostile(rng)
    data = b"\n".join(_json(rng, row) for row in rows)
    return mutate(rng, data) if rng.random() < 0.4 else data


def _read_rows(data: bytes) -> None:
    loaded = dataset.load(_file("rows.jsonl", data), "numeric")
    loaded.row(0x7FFFFFFF)


SURFACES: Final = (
    Surface(
        name="dnsaddr",
        reads="TXT records of a name",
        make=_make_dns,
        feed=_read_dns,
        refusals=(dnsaddr.LookupFailed,),
    ),
    Surface(
        name="peers-file",
        reads="a list of addresses that others write",
        make=_make_lines,
        feed=_read_peers_file,
        refusals=(ValueError,),
    ),
    Surface(
        name="public-list",
        reads="the list that comes with the program",
        make=_make_lines,
        feed=_read_public_list,
        refusals=(ValueError,),
    ),
    Surface(name="peers-json", reads="peers of earlier runs", make=_make_peers, feed=_read_peers),
    Surface(
        name="dataset",
        reads="the rows of a data set",
        make=_make_rows,
        feed=_read_rows,
        refusals=(dataset.DatasetError,),
    ),
)
