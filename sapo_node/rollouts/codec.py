"""Bytes <-> batches and announcements: size first, then signature, then decode.

What a stranger sent is looked at in the order in which looking gets expensive: its length, its header, its signature
(over a digest, so nothing is decompressed for a forger), its decompressed size (counted, since a frame's own claim
may lie), its structure (an iterative scan: no recursion a sender could exhaust), its types, its limits. Any failure
is one exception, `Rejected`, whose text never contains the sender's bytes.

Whether a batch is *true* (right question, own seeds, fresh) is `verify.py`; here it is only well formed and signed.

    envelope   MAGIC | version 1 | kind 1 | public key 32 | signature 64 | payload
    payload    kind B: zstd(msgpack(Batch))      kind A: msgpack(Announcement)
    signed     tag of the kind | 4-byte length | swarm name | content id = sha256(payload)
"""

import hashlib
import math
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec
import zstandard

from sapo_node.identity import Identity, peer_id_from_public_key, verify
from sapo_node.rollouts.schema import Announcement, Batch, Completion, Group, TaskRef
from sapo_node.swarm import protocol
from sapo_node.swarm.addresses import is_multiaddr

HEADER_BYTES: Final = len(protocol.MAGIC) + 1 + 1 + 32 + 64
_SIGNATURE_AT: Final = HEADER_BYTES - 64
_KEY_AT: Final = _SIGNATURE_AT - 32

_BATCH, _ANNOUNCEMENT = b"B", b"A"
_TAGS: Final = {_BATCH: protocol.BATCH_TAG, _ANNOUNCEMENT: protocol.ANNOUNCEMENT_TAG}
_LIMITS: Final = {_BATCH: protocol.MAX_ENVELOPE_BYTES, _ANNOUNCEMENT: protocol.MAX_RECORD_BYTES}

_batch_decoder = msgspec.msgpack.Decoder(Batch)
_announcement_decoder = msgspec.msgpack.Decoder(Announcement)


class Rejected(ValueError):
    """An envelope that no honest node of this wire version sends. The text is fixed, safe to log."""


class UnknownVersion(Rejected):
    """Another wire version. Not the sender's fault: ignore it without lowering its score."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A signed batch as it travels, and the digest by which it is asked for."""

    data: bytes
    content_id: bytes  # 32 bytes, sha256 of the payload


@dataclass(frozen=True, slots=True)
class Opened:
    """A well-formed batch whose signature belongs to `public_key` and whose peer id belongs to that key."""

    public_key: bytes
    content_id: bytes
    batch: Batch
    memory: int = 0  # bytes that it takes here: many times what came out of the frame, of characters or of numbers


def encode_batch(batch: Batch, identity: Identity) -> Envelope:
    """Sign and pack a batch of this node.

    Raises Rejected when the batch breaks a limit of the wire (everyone would reject it), such as too many groups.
    """
    _check_batch(batch, batch.swarm, identity.public_key)
    raw = _pack(batch)
    _require(len(raw) <= protocol.MAX_DECODED_BYTES, "the batch is too large")
    return _seal(_BATCH, zstandard.ZstdCompressor(level=3).compress(raw), batch.swarm, identity)


def open_batch(data: bytes, swarm: str) -> Opened:
    """Check and unpack the envelope of a batch for `swarm`. Raises Rejected.

    May take a tenth of a second, of values that nobody reads: not for the thread of an event loop.
    """
    public_key, payload = _open(data, _BATCH, swarm)
    raw = _inflate(payload)
    _check_structure(raw)
    try:
        batch = _batch_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Rejected("the batch does not have the fields of a batch") from None
    _check_batch(batch, swarm, public_key)
    return Opened(public_key, hashlib.sha256(payload).digest(), batch, _memory_of(batch))


def encode_announcement(announcement: Announcement, identity: Identity) -> bytes:
    """Sign and pack an announcement, at most MAX_RECORD_BYTES. Raises Rejected when it breaks a limit of the wire."""
    _check_announcement(announcement, announcement.swarm)
    return _seal(_ANNOUNCEMENT, _pack(announcement), announcement.swarm, identity).data


def open_announcement(data: bytes, swarm: str) -> tuple[bytes, Announcement]:
    """Check and unpack a signed announcement; returns the signer's public key beside it. Raises Rejected."""
    public_key, payload = _open(data, _ANNOUNCEMENT, swarm)
    _check_structure(payload)
    try:
        announcement = _announcement_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise Rejected("the announcement does not have the fields of an announcement") from None
    _check_announcement(announcement, swarm)
    return public_key, announcement


def content_id_of(data: bytes) -> bytes:
    """The content id (32 bytes) of an envelope, without opening it. Raises Rejected if it is too short to have one."""
    _require(len(data) > HEADER_BYTES, "the envelope is too short")
    return hashlib.sha256(memoryview(data)[HEADER_BYTES:]).digest()


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Rejected(reason)


# Envelope


def _signed_bytes(kind: bytes, swarm: str, content_id: bytes) -> bytes:
    name = swarm.encode()
    return _TAGS[kind] + len(name).to_bytes(4, "big") + name + content_id


def _seal(kind: bytes, payload: bytes, swarm: str, identity: Identity) -> Envelope:
    content_id = hashlib.sha256(payload).digest()
    signature = identity.sign(_signed_bytes(kind, swarm, content_id))
    head = protocol.MAGIC + bytes([protocol.PROTO]) + kind + identity.public_key + signature
    _require(len(head) + len(payload) <= _LIMITS[kind], "the envelope is too large")
    return Envelope(head + payload, content_id)


def _open(data: bytes, kind: bytes, swarm: str) -> tuple[bytes, bytes]:
    """Public key and payload of an envelope whose size, header and signature are right."""
    _require(len(data) <= _LIMITS[kind], "the envelope is too large")
    _require(len(data) > HEADER_BYTES, "the envelope is too short")
    magic = len(protocol.MAGIC)
    _require(data[:magic] == protocol.MAGIC, "this is not an envelope")
    if data[magic] != protocol.PROTO:
        raise UnknownVersion("the envelope has another wire version")
    _require(data[magic + 1 : _KEY_AT] == kind, "the envelope holds something else")
    public_key, signature = data[_KEY_AT:_SIGNATURE_AT], data[_SIGNATURE_AT:HEADER_BYTES]
    payload = data[HEADER_BYTES:]
    signed = _signed_bytes(kind, swarm, hashlib.sha256(payload).digest())
    _require(verify(public_key, signed, signature), "the signature does not fit (forged, damaged or another swarm)")
    return public_key, payload


def _pack(value: Batch | Announcement) -> bytes:
    try:
        raw = msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):
        raise Rejected("a text or number cannot be encoded") from None
    _check_structure(raw)
    return raw


def _inflate(payload: bytes) -> bytes:
    """Decompress exactly one zstd frame of at most MAX_DECODED_BYTES.

    The first pass only counts, in a small buffer and over all frames; the second, now known to be bounded, keeps the
    bytes of the first frame and tells whether it was whole and the only thing in the payload.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=protocol.MAX_DECODED_BYTES)
    try:
        size = 0
        with decompressor.stream_reader(payload, read_across_frames=True) as reader:
            while chunk := reader.read(1 << 16):
                size += len(chunk)
                _require(size <= protocol.MAX_DECODED_BYTES, "the batch is too large once decompressed")
        frame = decompressor.decompressobj()
        raw = frame.decompress(payload)
    except zstandard.ZstdError:
        raise Rejected("the payload is not one zstd frame") from None
    _require(frame.eof, "the zstd frame is cut short")
    _require(not frame.unused_data, "something follows the zstd frame")
    return raw


# Structure of msgpack, before anything recursive or allocating looks at it

# First byte -> bytes of the number or length that follows it.
_NUMBERS: Final = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_FLOATS: Final = {0xCA: ">f", 0xCB: ">d"}
_TEXTS: Final = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_ARRAYS: Final = {0xDC: ">H", 0xDD: ">I"}
_MAPS: Final = {0xDE: ">H", 0xDF: ">I"}
_SIZED: Final = {
    tag: struct.Struct(form) for t in (_NUMBERS, _FLOATS, _TEXTS, _ARRAYS, _MAPS) for tag, form in t.items()
}


def _check_structure(raw: bytes) -> None:
    """Exactly one msgpack value: bounded depth, bounded count, finite floats, exact integers, no extension types."""
    at = items = 0
    missing = [1]  # how many values each open container still lacks
    while missing:
        if missing[-1] == 0:
            missing.pop()
            continue
        missing[-1] -= 1
        items += 1
        _require(items <= protocol.MAX_ITEMS, "the message holds too many values")
        try:
            at, children = _step(raw, at)
        except (IndexError, struct.error):
            raise Rejected("the message is cut short") from None
        if children:
            _require(children <= len(raw) - at, "the message is cut short")
            missing.append(children)
            _require(len(missing) - 1 <= protocol.MAX_NESTING, "the message is nested too deeply")
    _require(at <= len(raw), "the message is cut short")
    _require(at == len(raw), "something follows the message")


def _step(raw: bytes, at: int) -> tuple[int, int]:
    """Read one header at `at`: where the next value begins, and how many values this one contains."""
    tag = raw[at]
    at += 1
    if tag <= 0x7F or tag >= 0xE0 or tag in (0xC0, 0xC2, 0xC3):
        return at, 0
    if tag <= 0x8F:
        return at, 2 * (tag & 0x0F)
    if tag <= 0x9F:
        return at, tag & 0x0F
    if tag <= 0xBF:
        return at + (tag & 0x1F), 0
    sized = _SIZED.get(tag)
    if sized is None:
        raise Rejected("the message holds an extension type")
    (value,) = sized.unpack_from(raw, at)
    at += sized.size
    if tag in _TEXTS:
        return at + value, 0
    if tag in _ARRAYS:
        return at, value
    if tag in _MAPS:
        return at, 2 * value
    if tag in _FLOATS:
        _require(math.isfinite(value), "a number is not finite")
    else:
        _require(-protocol.MAX_INTEGER <= value <= protocol.MAX_INTEGER, "an integer is too large")
    return at, 0


# Limits of decoded values


def _memory_of(batch: Batch) -> int:
    """Everything in it is counted: a text takes up to four bytes a character, and a number or an empty text takes more
    than thirty bytes of one or nine on the wire. What is shared is counted again."""
    size, parts = 0, list[object]([batch])
    while parts:
        part = parts.pop()
        size += sys.getsizeof(part)
        if isinstance(part, msgspec.Struct):
            parts += [getattr(part, name) for name in part.__struct_fields__]
        elif isinstance(part, dict):
            parts += [*part, *part.values()]
        elif isinstance(part, list):
            parts += part
    return size


def _check_batch(batch: Batch, swarm: str, public_key: bytes) -> None:
    if batch.proto != protocol.PROTO:
        raise UnknownVersion("the batch has another wire version")
    _require(batch.swarm == swarm, "the batch belongs to another swarm")
    _require(batch.peer_id == peer_id_from_public_key(public_key), "the peer id is not that of the key")
    _require(batch.seq >= 0 and batch.created_at >= 0, "a count or time is negative")
    _check_names(batch.model.name, batch.model.licence)
    _require(batch.model.params >= 0, "a count or time is negative")
    _require(len(batch.model.tokenizer_sha256) == 32, "a digest does not have 32 bytes")
    _require(1 <= len(batch.groups) <= protocol.MAX_GROUPS, "the batch has no groups or too many")
    coordinates = set()
    for group in batch.groups:
        _check_group(group)
        task = group.task
        coordinates.add((task.source, task.version, task.name, task.config_hash, task.epoch, task.index))
    _require(len(coordinates) == len(batch.groups), "two groups have the same coordinates")


def _check_group(group: Group) -> None:
    _check_task(group.task)
    _require(len(group.question_sha256) == 32, "a digest does not have 32 bytes")
    _require(group.sampled_at >= 0 and group.policy_version >= 0, "a count or time is negative")
    few, many = protocol.MIN_COMPLETIONS, protocol.MAX_COMPLETIONS
    _require(few <= len(group.completions) <= many, "a group has too few completions or too many")
    for completion in group.completions:
        _require(completion.n_tokens >= 0, "a count or time is negative")
        _require(_text_bytes(completion) <= protocol.MAX_TEXT_BYTES, "a completion is too long")


def _text_bytes(completion: Completion) -> int:
    try:
        return len(completion.text.encode())
    except UnicodeEncodeError:  # a lone surrogate, possible only in a batch of our own
        raise Rejected("a text or number cannot be encoded") from None


def _check_task(task: TaskRef) -> None:
    _check_names(task.name, task.version)
    _require(len(task.config_hash) == 32, "a digest does not have 32 bytes")
    _require(task.epoch >= 0, "a count or time is negative")
    _require(0 <= task.index < protocol.MAX_INDEX, "a task's index is out of range")
    _require(len(task.config) <= protocol.MAX_CONFIG_ENTRIES, "a task's configuration has too many entries")
    for key, value in task.config.items():
        values = value if isinstance(value, list) else [value]
        _require(len(values) <= protocol.MAX_CONFIG_LIST, "a list in a task's configuration is too long")
        texts = [key, *(v for v in values if isinstance(v, str))]
        _require(all(len(t) <= protocol.MAX_CONFIG_TEXT for t in texts), "a text in a task's configuration is too long")


def _check_names(*names: str) -> None:
    _require(all(len(name) <= protocol.MAX_NAME_CHARS for name in names), "a name is too long")


def _check_announcement(announcement: Announcement, swarm: str) -> None:
    a = announcement
    if a.proto != protocol.PROTO:
        raise UnknownVersion("the announcement has another wire version")
    _require(a.swarm == swarm, "the announcement belongs to another swarm")
    _require(a.epoch >= 0 and a.seq >= 0 and a.created_at >= 0, "a count or time is negative")
    _require(0 <= a.k <= protocol.MAX_SHARD_BITS and 0 <= a.prefix < 1 << a.k, "the shard is out of range")
    _check_names(a.version)
    _check_texts(a.roles, protocol.MAX_ROLES, protocol.MAX_NAME_CHARS)
    _check_texts(a.addresses, protocol.MAX_ADDRESSES, protocol.MAX_ADDRESS_CHARS)
    _require(all(map(is_multiaddr, a.addresses)), "an address is no multiaddr")
    _require(len(a.batches) <= protocol.MAX_LISTINGS, "the announcement lists too many batches")
    for listing in a.batches:
        _require(len(listing.content_id) == 32, "a digest does not have 32 bytes")
        _require(HEADER_BYTES < listing.size <= protocol.MAX_ENVELOPE_BYTES, "a listed size is out of range")
        _require(1 <= listing.groups <= protocol.MAX_GROUPS, "a listed batch has no groups or too many")
        _require(listing.created_at >= 0, "a count or time is negative")
    _require(len({b.content_id for b in a.batches}) == len(a.batches), "a batch is listed twice")


def _check_texts(texts: Iterable[str], count: int, length: int) -> None:
    texts = list(texts)
    _require(len(texts) <= count and all(len(t) <= length for t in texts), "the announcement has too much text")
