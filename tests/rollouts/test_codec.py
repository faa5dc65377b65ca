"""The codec: what is valid survives the trip, what is not is refused by one exception, before it costs anything."""

import contextlib
import math
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sapo_node.identity import Identity
from sapo_node.rollouts import codec
from sapo_node.rollouts.codec import Rejected, UnknownVersion
from sapo_node.rollouts.schema import Announcement, Batch, Completion, Group, Listing, ModelCard, TaskRef
from sapo_node.swarm import protocol

SWARM = "test"
replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def me(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.create(tmp_path_factory.mktemp("key") / "identity.key")


def task(**changes: Any) -> TaskRef:
    fields = {"source": "reasoning_gym", "version": "0.1.25", "name": "basic_arithmetic", "config_hash": bytes(32)}
    return TaskRef(**{**fields, "config": {}, "epoch": 5, "index": 0, **changes})


def group(**changes: Any) -> Group:
    answers = [Completion(text="4", finish="stop", n_tokens=2), Completion(text="5", finish="length", n_tokens=1)]
    fields = {"task": task(), "question_sha256": bytes(32), "completions": answers}
    return Group(**{**fields, "sampled_at": 150.0, "policy_version": 3, **changes})


def batch(me: Identity, **changes: Any) -> Batch:
    card = ModelCard(name="tiny", params=1000, licence="apache-2.0", tokenizer_sha256=bytes(32))
    fields = {"proto": 1, "swarm": SWARM, "peer_id": me.peer_id, "seq": 1, "created_at": 151.0, "model": card}
    return Batch(**{**fields, "groups": [group()], **changes})


def announcement(**changes: Any) -> Announcement:
    listing = Listing(content_id=bytes(32), size=500, groups=1, created_at=151.0)
    fields = {"proto": 1, "swarm": SWARM, "epoch": 5, "k": 0, "prefix": 0, "seq": 1, "created_at": 151.0}
    fields |= {"version": "0.1.0", "roles": [], "addresses": ["/ip4/127.0.0.1/tcp/4001"], "batches": [listing]}
    return Announcement(**{**fields, **changes})


def seal(payload: bytes, me: Identity, kind: bytes = b"B") -> bytes:
    """An envelope of any payload, signed properly: what a hostile but well-informed sender makes."""
    return codec._seal(kind, payload, SWARM, me).data


def seal_raw(raw: bytes, me: Identity) -> bytes:
    return seal(zstandard.compress(raw), me)


def seal_batch(value: Batch, me: Identity) -> bytes:
    return seal_raw(msgspec.msgpack.encode(value), me)


def refused(data: bytes, reason: str) -> None:
    with pytest.raises(Rejected, match=reason):
        codec.open_batch(data, SWARM)


# Round trips

small_text = st.text(max_size=20)
floats = st.floats(min_value=0, max_value=1e12)
counts = st.integers(0, protocol.MAX_INTEGER)
digests = st.binary(min_size=32, max_size=32)
scalars = (
    st.booleans()
    | st.integers(-protocol.MAX_INTEGER, protocol.MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | small_text
)
tasks = st.builds(
    TaskRef,
    source=st.sampled_from(["reasoning_gym", "dataset"]),
    version=small_text,
    name=small_text,
    config_hash=digests,
    config=st.dictionaries(small_text, scalars | st.lists(scalars, max_size=4), max_size=4),
    epoch=counts,
    index=st.integers(0, protocol.MAX_INDEX - 1),
)
completions = st.builds(Completion, text=small_text, finish=st.sampled_from(["stop", "length"]), n_tokens=counts)
groups = st.builds(
    Group,
    task=tasks,
    question_sha256=digests,
    completions=st.lists(completions, min_size=2, max_size=4),
    sampled_at=floats,
    policy_version=counts,
)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(groups, min_size=1, max_size=4, unique_by=lambda g: (g.task.epoch, g.task.index)), counts, floats)
def test_every_valid_batch_survives_the_trip(me: Identity, these: list[Group], seq: int, when: float) -> None:
    sent = batch(me, groups=these, seq=seq, created_at=when)
    envelope = codec.encode_batch(sent, me)
    opened = codec.open_batch(envelope.data, SWARM)
    assert opened.batch == sent
    assert (opened.public_key, opened.content_id) == (me.public_key, envelope.content_id)
    assert codec.content_id_of(envelope.data) == envelope.content_id


def test_an_announcement_survives_the_trip(me: Identity) -> None:
    sent = announcement()
    assert codec.open_announcement(codec.encode_announcement(sent, me), SWARM) == (me.public_key, sent)


# Nothing but Rejected comes out


def both(data: bytes) -> None:
    for opener in (codec.open_batch, codec.open_announcement):
        with contextlib.suppress(Rejected):
            opener(data, SWARM)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_only_rejected(data: bytes) -> None:
    both(data)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.sampled_from([b"B", b"A"]), st.booleans())
def test_arbitrary_signed_payloads_raise_only_rejected(me: Identity, raw: bytes, kind: bytes, packed: bool) -> None:
    both(seal(zstandard.compress(raw) if packed else raw, me, kind))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_signed_batches_with_damaged_bytes_raise_only_rejected(me: Identity, data: st.DataObject) -> None:
    raw = bytearray(msgspec.msgpack.encode(batch(me)))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    both(seal_raw(bytes(raw), me))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | small_text | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(small_text, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(Batch.__struct_fields__ + TaskRef.__struct_fields__), values)
def test_any_value_in_any_field_raises_only_rejected(me: Identity, field: str, value: Any) -> None:
    fields = msgspec.to_builtins(batch(me), builtin_types=(bytes,))
    target = fields["groups"][0]["task"] if field in TaskRef.__struct_fields__ else fields
    target[field] = value
    both(seal_raw(msgspec.msgpack.encode(fields), me))


# Signature and header


def test_a_changed_payload_is_refused(me: Identity) -> None:
    data = bytearray(codec.encode_batch(batch(me), me).data)
    data[-1] ^= 1
    refused(bytes(data), "signature")


def test_a_batch_is_valid_in_its_swarm_only(me: Identity) -> None:
    data = codec.encode_batch(batch(me), me).data
    with pytest.raises(Rejected, match="signature"):
        codec.open_batch(data, "other")


def test_an_announcement_cannot_pass_for_a_batch(me: Identity) -> None:
    data = bytearray(codec.encode_announcement(announcement(), me))
    refused(bytes(data), "something else")
    data[5:6] = b"B"
    refused(bytes(data), "signature")


def test_the_signature_is_checked_before_decompression(me: Identity) -> None:
    data = bytearray(seal(b"\xff" * 50, me))
    refused(bytes(data), "zstd")
    data[60] ^= 1
    refused(bytes(data), "signature")


def test_a_peer_id_of_someone_else_is_refused(me: Identity, tmp_path: Path) -> None:
    other = Identity.create(tmp_path / "other.key")
    refused(seal_batch(batch(me, peer_id=other.peer_id), me), "peer id")


def test_a_newer_version_is_not_held_against_the_sender(me: Identity) -> None:
    data = bytearray(codec.encode_batch(batch(me), me).data)
    data[4] = 2
    with pytest.raises(UnknownVersion):
        codec.open_batch(bytes(data), SWARM)
    with pytest.raises(UnknownVersion):
        codec.open_batch(seal_batch(batch(me, proto=2), me), SWARM)


# Limits, at and just beyond


def many_groups(n: int) -> list[Group]:
    return [group(task=task(index=i)) for i in range(n)]


def answers(n: int, text: str = "x") -> list[Completion]:
    return [Completion(text=text, finish="stop", n_tokens=0) for _ in range(n)]


def one(**changes: Any) -> dict[str, Any]:
    return {"groups": [group(**changes)]}


def one_task(**changes: Any) -> dict[str, Any]:
    return one(task=task(**changes))


def card(**changes: Any) -> dict[str, Any]:
    fields = {"name": "tiny", "params": 1, "licence": "mit", "tokenizer_sha256": bytes(32), **changes}
    return {"model": ModelCard(**fields)}


LIMITS = {
    "groups, most": ({"groups": many_groups(32)}, {"groups": many_groups(33)}),
    "groups, fewest": ({"groups": many_groups(1)}, {"groups": []}),
    "completions, fewest": (one(completions=answers(2)), one(completions=answers(1))),
    "completions, most": (one(completions=answers(64)), one(completions=answers(65))),
    "text": (one(completions=answers(2, "é" * 32_768)), one(completions=answers(2, "é" * 32_768 + "x"))),
    "tokens": (
        one(completions=answers(2)),
        one(completions=[Completion(text="", finish="stop", n_tokens=-1), *answers(1)]),
    ),
    "integers": ({"seq": 2**53 - 1}, {"seq": 2**53}),
    "seq": ({"seq": 0}, {"seq": -1}),
    "created_at": ({"created_at": 0.0}, {"created_at": -0.1}),
    "policy version": (one(policy_version=0), one(policy_version=-1)),
    "sampled_at": (one(sampled_at=0.0), one(sampled_at=-1.0)),
    "question digest": (one(question_sha256=bytes(32)), one(question_sha256=bytes(33))),
    "config digest": (one_task(config_hash=bytes(32)), one_task(config_hash=bytes(31))),
    "index, least": (one_task(index=0), one_task(index=-1)),
    "index, most": (one_task(index=4095), one_task(index=4096)),
    "epoch": (one_task(epoch=0), one_task(epoch=-1)),
    "name": (one_task(name="n" * 64), one_task(name="n" * 65)),
    "version": (one_task(version="n" * 64), one_task(version="n" * 65)),
    "config entries": (
        one_task(config={f"{i}": i for i in range(32)}),
        one_task(config={f"{i}": i for i in range(33)}),
    ),
    "config list": (one_task(config={"a": [0] * 32}), one_task(config={"a": [0] * 33})),
    "config key": (one_task(config={"k" * 256: 0}), one_task(config={"k" * 257: 0})),
    "config text": (one_task(config={"a": "t" * 256}), one_task(config={"a": "t" * 257})),
    "config text in a list": (one_task(config={"a": ["t" * 256]}), one_task(config={"a": ["t" * 257]})),
    "coordinates": ({"groups": many_groups(2)}, {"groups": [group(), group()]}),
    "model name": (card(name="m" * 64), card(name="m" * 65)),
    "licence": (card(licence="m" * 64), card(licence="m" * 65)),
    "parameters": (card(params=0), card(params=-1)),
    "tokenizer digest": (card(tokenizer_sha256=bytes(32)), card(tokenizer_sha256=b"")),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_batch_is_valid_at_each_limit_and_refused_beyond_it(me: Identity, limit: str) -> None:
    at, beyond = LIMITS[limit]
    codec.open_batch(codec.encode_batch(batch(me, **at), me).data, SWARM)
    with pytest.raises(Rejected):
        codec.encode_batch(batch(me, **beyond), me)
    with pytest.raises(Rejected):
        codec.open_batch(seal_batch(batch(me, **beyond), me), SWARM)


def test_the_largest_configurations_stay_below_the_count_of_values(me: Identity) -> None:
    config = {f"{i}": list(range(32)) for i in range(32)}
    full = [group(task=task(index=i, config=config), completions=answers(64)) for i in range(32)]
    codec.open_batch(codec.encode_batch(batch(me, groups=full), me).data, SWARM)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_anywhere(me: Identity, number: float) -> None:
    for changes in ({"created_at": number}, one(sampled_at=number), one_task(config={"a": [number]})):
        refused(seal_batch(batch(me, **changes), me), "not finite")
    unknown = {**msgspec.to_builtins(batch(me), builtin_types=(bytes,)), "later": number}
    refused(seal_raw(msgspec.msgpack.encode(unknown), me), "not finite")


def test_unknown_fields_are_ignored(me: Identity) -> None:
    fields = {**msgspec.to_builtins(batch(me), builtin_types=(bytes,)), "later": [1, 2]}
    assert codec.open_batch(seal_raw(msgspec.msgpack.encode(fields), me), SWARM).batch == batch(me)


def test_text_that_is_no_utf8_is_refused(me: Identity) -> None:
    raw = msgspec.msgpack.encode(batch(me, **one(completions=answers(2, "abc"))))
    for bad in (b"\xff\xfe\xfd", b"\xed\xa0\x80"):  # the second is a lone surrogate
        refused(seal_raw(raw.replace(b"abc", bad), me), "fields of a batch")
    with pytest.raises(Rejected):
        codec.encode_batch(batch(me, **one(completions=answers(2, "\ud800"))), me)


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


def test_nesting_is_refused_beyond_the_limit_before_decoding(me: Identity) -> None:
    refused(seal_raw(nested(16), me), "fields of a batch")
    refused(seal_raw(nested(17), me), "nested too deeply")
    refused(seal_raw(nested(1_000_000), me), "nested too deeply")


def test_the_number_of_values_is_limited(me: Identity) -> None:
    def array(n: int) -> bytes:
        return b"\xdd" + n.to_bytes(4, "big") + bytes(n)

    refused(seal_raw(array(protocol.MAX_ITEMS - 1), me), "fields of a batch")
    refused(seal_raw(array(protocol.MAX_ITEMS), me), "too many values")


@pytest.mark.parametrize("raw", [b"\xc7\x01\x05x", b"\xd4\x05x", b"\xc1"])
def test_extension_types_are_refused(me: Identity, raw: bytes) -> None:
    refused(seal_raw(raw, me), "extension")


@pytest.mark.parametrize("raw", [b"", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xffabc", b"\xcb\x00", b"\xa5abc"])
def test_messages_that_end_early_are_refused(me: Identity, raw: bytes) -> None:
    refused(seal_raw(raw, me), "cut short")


# Compression


def test_trailing_bytes_are_refused(me: Identity) -> None:
    raw = msgspec.msgpack.encode(batch(me))
    frame = zstandard.compress(raw)
    refused(seal_raw(raw + b"\x00", me), "follows the message")
    refused(seal(frame + b"\x00", me), "not one zstd frame")
    refused(seal(frame + frame, me), "follows the zstd frame")
    refused(seal(b"\x50\x2a\x4d\x18\x01\x00\x00\x00x" + frame, me), "follows the zstd frame")  # a skippable frame


def test_a_frame_that_ends_early_is_refused(me: Identity) -> None:
    refused(seal(zstandard.compress(msgspec.msgpack.encode(batch(me)))[:-3], me), "zstd")


def frame_of(size: int, declared: bool) -> bytes:
    compressor = zstandard.ZstdCompressor(level=19, write_content_size=declared)
    return compressor.compress(bytes(size))


@pytest.mark.parametrize("declared", [True, False])
def test_the_decompressed_size_is_counted(me: Identity, declared: bool) -> None:
    refused(seal(frame_of(protocol.MAX_DECODED_BYTES, declared), me), "follows the message")
    with pytest.raises(Rejected, match=r"once decompressed|zstd frame"):
        codec.open_batch(seal(frame_of(protocol.MAX_DECODED_BYTES + 1, declared), me), SWARM)


ASTRAL = "\N{GRINNING FACE}"
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing but answers": {},
    "lists of numbers": {f"k{i}": [j + 0.5 for j in range(32)] for i in range(32)},
    "keys of four bytes a character": {ASTRAL * 250 + f"{i:06d}": 1 for i in range(32)},
    "both": {ASTRAL * 250 + f"{i:06d}": [j + 0.5 for j in range(20)] for i in range(32)},
}


@pytest.mark.parametrize("config", SETTINGS.values(), ids=SETTINGS)
def test_all_that_a_batch_takes_is_counted(me: Identity, config: dict[str, Any]) -> None:
    """Hope: what waits for the scorers is bounded by its texts, so settings, numbers and empty answers are free."""
    empty = [Completion(text="", finish="stop", n_tokens=2**40) for _ in range(2 if config else 64)]
    groups = [
        group(task=task(index=i, config=config), completions=empty, question_sha256=bytes([i]) * 32) for i in range(32)
    ]
    data = codec.encode_batch(batch(me, groups=groups), me).data
    codec.open_batch(data, SWARM)
    tracemalloc.start()
    opened = codec.open_batch(data, SWARM)
    takes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.9 * takes < opened.memory < 3 * takes


@pytest.mark.parametrize("declared", [True, False])
def test_a_small_bomb_costs_little_memory(me: Identity, declared: bool) -> None:
    bomb = seal(frame_of(100 << 20, declared), me)
    assert len(bomb) < 16_384
    tracemalloc.start()
    with pytest.raises(Rejected, match=r"once decompressed|zstd frame"):
        codec.open_batch(bomb, SWARM)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_the_envelope_size_is_limited(me: Identity) -> None:
    data = codec.encode_batch(batch(me), me).data
    padding = protocol.MAX_ENVELOPE_BYTES - len(data)
    refused(data + bytes(padding), "signature")
    refused(data + bytes(padding + 1), "too large")
    refused(data[: codec.HEADER_BYTES], "too short")


# Announcements


def listings(n: int) -> list[Listing]:
    return [Listing(bytes([i]) * 32, 500, 1, 1.0) for i in range(n)]


ANNOUNCEMENT_LIMITS = {
    "batches": ({"batches": listings(8)}, {"batches": listings(9)}),
    "batches, distinct": ({"batches": listings(1)}, {"batches": listings(1) * 2}),
    "size, least": ({"batches": [Listing(bytes(32), 103, 1, 1.0)]}, {"batches": [Listing(bytes(32), 102, 1, 1.0)]}),
    "size, most": (
        {"batches": [Listing(bytes(32), protocol.MAX_ENVELOPE_BYTES, 1, 1.0)]},
        {"batches": [Listing(bytes(32), protocol.MAX_ENVELOPE_BYTES + 1, 1, 1.0)]},
    ),
    "groups": ({"batches": [Listing(bytes(32), 500, 32, 1.0)]}, {"batches": [Listing(bytes(32), 500, 33, 1.0)]}),
    "digest": ({"batches": [Listing(bytes(32), 500, 1, 1.0)]}, {"batches": [Listing(bytes(31), 500, 1, 1.0)]}),
    "addresses": ({"addresses": ["/a"] * 8}, {"addresses": ["/a"] * 9}),
    "address": ({"addresses": [f"/{'a' * 127}"]}, {"addresses": [f"/{'a' * 128}"]}),
    "address, slash": ({"addresses": ["/a"]}, {"addresses": ["a"]}),
    "address, visible": ({"addresses": ["/~!"]}, {"addresses": ["/dns4/a\x1b[2J"]}),
    "address, one line": ({"addresses": ["/a"]}, {"addresses": ["/a\n"]}),
    "address, ASCII": ({"addresses": ["/a"]}, {"addresses": ["/a\u202e"]}),
    "roles": ({"roles": ["a"] * 8}, {"roles": ["a"] * 9}),
    "k": ({"k": 16}, {"k": 17}),
    "prefix": ({"k": 2, "prefix": 3}, {"k": 2, "prefix": 4}),
    "epoch": ({"epoch": 0}, {"epoch": -1}),
    "time": ({"created_at": 0.0}, {"created_at": math.nan}),
}


@pytest.mark.parametrize("limit", ANNOUNCEMENT_LIMITS)
def test_an_announcement_is_valid_at_each_limit_and_refused_beyond_it(me: Identity, limit: str) -> None:
    at, beyond = ANNOUNCEMENT_LIMITS[limit]
    codec.open_announcement(codec.encode_announcement(announcement(**at), me), SWARM)
    with pytest.raises(Rejected):
        codec.encode_announcement(announcement(**beyond), me)
    with pytest.raises(Rejected):
        codec.open_announcement(seal(msgspec.msgpack.encode(announcement(**beyond)), me, b"A"), SWARM)


def test_a_record_is_at_most_a_kibibyte(me: Identity) -> None:
    spare = protocol.MAX_RECORD_BYTES - len(codec.encode_announcement(announcement(addresses=["/" * 100] * 6), me))
    exact = announcement(addresses=["/" * 100] * 6, roles=["r" * 60] * (spare // 61))
    assert len(codec.encode_announcement(exact, me)) <= protocol.MAX_RECORD_BYTES
    with pytest.raises(Rejected, match="too large"):
        codec.encode_announcement(announcement(addresses=["/" * 128] * 8), me)
    with pytest.raises(Rejected, match="too large"):
        codec.open_announcement(bytes(protocol.MAX_RECORD_BYTES + 1), SWARM)
