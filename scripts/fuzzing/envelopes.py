"""Signed envelopes: batches and announcements. Nobody's bytes are decoded before their signature was found right."""

import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Final

import msgspec
import zstandard
from msgspec.structs import replace

from sapo_node.identity import Identity, verify
from sapo_node.rollouts import codec
from sapo_node.rollouts.schema import Batch, Completion
from sapo_node.swarm import protocol

from . import values
from .mutate import hostile, mutate, packed, random_bytes, tokens, twist
from .run import Broken, Surface

_COMPRESSOR: Final = zstandard.ZstdCompressor(level=1)
_BOMBS: Final = (
    _COMPRESSOR.compress(bytes(64 << 20)),
    _COMPRESSOR.compress(b"\xa1a" * (5 << 20)),
    _COMPRESSOR.compress(bytes(1000)) * 500,
    b"\x50\x2a\x4d\x18\xff\xff\xff\xff" + bytes(100),  # a frame to be skipped, of 4 GiB
    b"\x28\xb5\x2f\xfd\x00\xf8" + bytes(40),  # a window as large as the format allows
)
_DECODERS: Final = "_inflate", "_check_structure"


@contextmanager
def _watching() -> Iterator[list[str]]:
    """Notes, in the list, whatever of `_DECODERS` the codec calls."""
    called: list[str] = []
    originals = {name: getattr(codec, name) for name in _DECODERS}

    def noting(name: str, data: bytes) -> Any:
        called.append(name)
        return originals[name](data)

    try:
        for name in _DECODERS:
            setattr(codec, name, functools.partial(noting, name))
        yield called
    finally:
        for name, original in originals.items():
            setattr(codec, name, original)


def _is_signed(data: bytes, kind: bytes, tag: bytes) -> bool:
    """Whether an envelope's signature is right, computed apart from the codec."""
    head = codec.HEADER_BYTES
    key, signature, payload = data[head - 96 : head - 64], data[head - 64 : head], data[head:]
    signed = tag + len(values.SWARM).to_bytes(4, "big") + values.SWARM.encode() + hashlib.sha256(payload).digest()
    return data[5:6] == kind and len(data) > head and verify(key, signed, signature)


def _sealed(rng: Random, kind: bytes, payload: bytes) -> bytes:
    """A rightly signed envelope of any payload, of either key."""
    signer: Identity = rng.choice((values.ME, values.OTHER))
    try:
        return codec._seal(kind, payload, values.SWARM, signer).data
    except codec.Rejected:  # too large to be sealed: unsigned then
        return bytes(codec.HEADER_BYTES) + payload


def _opening(kind: bytes, tag: bytes, opener: Callable[[bytes], Any]) -> Callable[[bytes], None]:
    def feed(data: bytes) -> None:
        with _watching() as called:
            try:
                opener(data)
            finally:
                if called and not _is_signed(data, kind, tag):
                    raise Broken("an envelope with a wrong signature was decoded")

    return feed


@functools.cache
def _batches() -> list[tuple[Batch, bytes]]:
    """Valid batches, and sealed; signing each anew would take most of the time."""
    made = [values.batch(Random(n)) for n in range(32)]
    return [(batch, codec.encode_batch(batch, values.ME).data) for batch in made]


@functools.cache
def _full() -> bytes:
    """The largest batch that is valid: 7.9 MB of text in all completions that fit."""
    valid = values.batch(Random(0))
    answers = [Completion(text="1 + 1 = 2. " * 330, finish="stop", n_tokens=9)] * protocol.MAX_COMPLETIONS
    groups = [replace(values.group(Random(n), n), completions=answers) for n in range(protocol.MAX_GROUPS)]
    return codec.encode_batch(replace(valid, groups=groups), values.ME).data


def _make_batch(rng: Random) -> bytes:
    kind = rng.randrange(12)
    if kind == 0:
        return random_bytes(rng, 2000)
    valid, sealed = rng.choice(_batches())
    if kind == 1:
        return sealed
    if kind <= 4:
        return mutate(rng, sealed, rng.choice(_batches())[1])
    if kind == 5:
        return _sealed(rng, b"B", mutate(rng, _COMPRESSOR.compress(packed(valid))))
    if kind == 6 and rng.random() < 0.05:  # each costs milliseconds
        return _full() if rng.random() < 0.2 else _sealed(rng, b"B", rng.choice(_BOMBS))
    if kind == 7:
        raw = tokens(rng)
    elif kind == 8:
        raw = mutate(rng, packed(valid), packed(rng.choice(_batches())[0]))
    elif kind == 9:
        raw = packed(hostile(rng))
    else:
        raw = packed(twist(rng, values.plain(valid)))
    return _sealed(rng, b"B", _COMPRESSOR.compress(raw))


def _read_batch(data: bytes) -> None:
    opened = codec.open_batch(data, values.SWARM)
    signer = next((i for i in (values.ME, values.OTHER) if i.public_key == opened.public_key), None)
    if signer is None:
        raise Broken("a batch was taken that no key of the fuzzer signed")
    again = codec.open_batch(codec.encode_batch(opened.batch, signer).data, values.SWARM)
    if again.batch != opened.batch:
        raise Broken("a batch reads otherwise when it is written again")


def _make_announcement(rng: Random) -> bytes:
    kind = rng.randrange(10)
    if kind == 0:
        return random_bytes(rng)
    valid = values.announcement(rng)
    if kind == 1:
        return codec.encode_announcement(valid, values.ME)
    if kind <= 3:
        sealed = codec.encode_announcement(valid, values.ME)
        return mutate(rng, sealed, sealed)
    if kind == 4:
        return _sealed(rng, b"A", tokens(rng))
    if kind == 5:
        return _sealed(rng, b"A", mutate(rng, packed(valid)))
    if kind == 6:
        return _sealed(rng, b"A", packed(hostile(rng)))
    return _sealed(rng, b"A", packed(twist(rng, values.plain(valid))))


def _read_announcement(data: bytes) -> None:
    _, announcement = codec.open_announcement(data, values.SWARM)
    again = msgspec.msgpack.decode(packed(announcement), type=type(announcement))
    if again != announcement:
        raise Broken("an announcement reads otherwise when it is written again")


SURFACES: Final = (
    Surface(
        name="batch",
        reads="a fetched envelope",
        make=_make_batch,
        feed=_opening(b"B", protocol.BATCH_TAG, _read_batch),
        refusals=(codec.Rejected,),
        seconds=1.0,
        memory=4 * protocol.MAX_DECODED_BYTES,
    ),
    Surface(
        name="announcement",
        reads="an announcement, from the DHT or as a hint",
        make=_make_announcement,
        feed=_opening(b"A", protocol.ANNOUNCEMENT_TAG, _read_announcement),
        refusals=(codec.Rejected,),
    ),
)
