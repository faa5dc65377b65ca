"""Attacks on what reads bytes: envelopes that are signed properly, since anyone can make a key."""

import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from sapo_node.identity import Identity
from sapo_node.monitor.text import clean
from sapo_node.rollouts import codec
from sapo_node.rollouts.codec import Rejected
from sapo_node.rollouts.verify import Reason
from sapo_node.swarm import protocol
from tests.rollouts.test_codec import SWARM, batch, group, seal, seal_raw, task

HEAD = {"proto": b"\x01", "swarm": msgspec.msgpack.encode(SWARM)}


@pytest.fixture(scope="module")
def me(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity.create(tmp_path_factory.mktemp("key") / "identity.key")


def message(me: Identity, *extra: tuple[bytes, bytes], **changes: Any) -> bytes:
    """A batch as a map of raw parts, with further pairs behind those that belong there."""
    fields = msgspec.to_builtins(batch(me, **changes), builtin_types=(bytes,))
    pairs = [(msgspec.msgpack.encode(key), msgspec.msgpack.encode(value)) for key, value in fields.items()]
    pairs += extra
    return b"\xde" + struct.pack(">H", len(pairs)) + b"".join(key + value for key, value in pairs)


def pair(key: str, value: Any) -> tuple[bytes, bytes]:
    return msgspec.msgpack.encode(key), msgspec.msgpack.encode(value)


def refused_cheaply(data: bytes, reason: str, memory: int = 1 << 20) -> None:
    """Refused within a quarter of a second of computing and `memory` bytes."""
    started = time.thread_time()
    with pytest.raises(Rejected, match=reason):
        codec.open_batch(data, SWARM)
    assert time.thread_time() - started < 0.25
    tracemalloc.start()
    try:
        with pytest.raises(Rejected, match=reason):
            codec.open_batch(data, SWARM)
        assert tracemalloc.get_traced_memory()[1] < memory
    finally:
        tracemalloc.stop()


def test_the_same_key_twice_lets_nobody_pass_for_another(me: Identity) -> None:
    """Hope: the check sees the first `peer_id`, and what follows uses the second."""
    other = Identity.create(me.path.parent / "twice.key")
    with pytest.raises(Rejected, match="peer id is not that of the key"):
        codec.open_batch(seal_raw(message(me, pair("peer_id", other.peer_id)), me), SWARM)
    with pytest.raises(Rejected, match="another swarm"):
        codec.open_batch(seal_raw(message(me, pair("swarm", "other")), me), SWARM)
    opened = codec.open_batch(seal_raw(message(me, pair("peer_id", me.peer_id), peer_id=other.peer_id), me), SWARM)
    assert opened.batch.peer_id == me.peer_id, "what was checked is what is used"


def test_the_same_setting_twice_is_hashed_as_it_is_used(me: Identity) -> None:
    """Hope: the hash covers the harmless value of a setting, and the generator gets the other."""
    raw = msgspec.msgpack.encode(batch(me, groups=[group(task=task(config={"max_n": 3}))]))
    twice = raw.replace(b"\x81\xa5max_n\x03", b"\x82\xa5max_n\x03\xa5max_n\xcd\x0b\xb8")
    opened = codec.open_batch(seal_raw(twice, me), SWARM)
    assert opened.batch.groups[0].task.config == {"max_n": 3000}, "the struct holds one value, and all look at that"


@pytest.mark.parametrize(
    "head", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_a_giant_array_of_five_bytes(me: Identity, head: bytes) -> None:
    """Hope: room is made for four billion entries before anyone looks whether they are there."""
    refused_cheaply(seal_raw(head, me), "cut short")
    refused_cheaply(seal_raw(message(me, (b"\xa1x", head)), me), "cut short|too many")


def test_a_hundred_thousand_empty_arrays(me: Identity) -> None:
    """Hope: a message of one byte a value costs a hundred bytes of memory and a microsecond for each."""
    refused_cheaply(seal_raw(message(me, (b"\xa1x", b"\xdd\0\x01\x86\xa0" + b"\x90" * 100_000)), me), "too many values")


@pytest.mark.parametrize("changes", [{"groups": []}, {"groups": [group(completions=[])]}])
def test_empty_arrays_where_something_must_be(me: Identity, changes: dict[str, Any]) -> None:
    """Hope: a division by the number of groups or of completions."""
    with pytest.raises(Rejected, match=r"no groups|too few"):
        codec.open_batch(seal_raw(message(me, **changes), me), SWARM)


def test_numbers_as_text_and_flags_as_numbers(me: Identity) -> None:
    """Hope: a lenient decoder makes 1 of true and of "1", so that one batch has two readings."""
    for value in (True, "1", 1.0, None, [1]):
        with pytest.raises(Rejected):
            codec.open_batch(seal_raw(message(me, pair("seq", value)), me), SWARM)


def test_a_window_of_gigabytes(me: Identity) -> None:
    """Hope: the frame's header makes the decompressor reserve a window of two gigabytes."""
    header = b"\x28\xb5\x2f\xfd\x00" + bytes([(31 - 10) << 3])
    refused_cheaply(seal(header + b"\x01\x00\x00", me), "zstd frame")


def test_a_frame_to_be_skipped_hides_the_batch_behind_it(me: Identity) -> None:
    """Hope: one implementation reads the first frame and another the second, under one content id."""
    good = zstandard.compress(msgspec.msgpack.encode(batch(me)))
    skipped = b"\x50\x2a\x4d\x18" + struct.pack("<I", 8) + b"whatever"
    for payload in (skipped + good, good + skipped):
        with pytest.raises(Rejected):
            codec.open_batch(seal(payload, me), SWARM)


def test_a_frame_that_lies_about_its_size(me: Identity) -> None:
    """Hope: the frame says 100 bytes and holds megabytes, or the other way round."""
    raw = msgspec.msgpack.encode(batch(me))
    honest = zstandard.ZstdCompressor(write_content_size=True).compress(raw)
    assert honest[4] & 0xE0 == 0x60, "two bytes of content size, in a single segment"
    assert int.from_bytes(honest[5:7], "little") + 256 == len(raw)
    for size in (0, len(raw) - 257, len(raw) - 255, 65_535):
        with pytest.raises(Rejected, match="zstd frame"):
            codec.open_batch(seal(honest[:5] + size.to_bytes(2, "little") + honest[7:], me), SWARM)


def test_control_and_bidi_characters_in_names_reach_no_terminal(me: Identity) -> None:
    """Hope: a task or model name moves the cursor, forges a log line, or reads backwards in the owner's terminal."""
    name = "\x1b[2J\x1b]0;owned\x07\u202egpj.exe\r\nINFO all is well"
    opened = codec.open_batch(seal_raw(message(me, groups=[group(task=task(name=name))]), me), SWARM)
    assert opened.batch.groups[0].task.name == name, "names are only bounded in length; what shows them cleans them"
    assert clean(name) == "gpj.exe INFO all is well"
    assert all(reason.value.isascii() and reason.value.isprintable() for reason in Reason), "reasons quote nobody"


def test_a_refusal_quotes_nothing_of_the_sender(me: Identity) -> None:
    """Hope: what was refused reaches a log through the words of the refusal."""
    marker = "\x1b[31mMARK"
    told = []
    for extra in (pair("swarm", marker), pair("peer_id", marker), pair("seq", marker), pair("groups", [marker])):
        with pytest.raises(Rejected) as refusal:
            codec.open_batch(seal_raw(message(me, extra), me), SWARM)
        told.append(str(refusal.value))
    assert not [text for text in told if "MARK" in text or not text.isprintable()]


def test_bytes_of_another_kind_of_file(tmp_path: Path) -> None:
    """Hope: something in the reader recognises a format of its own (pickle, gzip, ELF) and acts on it."""
    for data in (
        b"\x80\x04\x95",
        b"\x1f\x8b\x08\0",
        b"\x7fELF",
        b"PK\x03\x04",
        b"SAPO",
        b"SAPO\x01",
        protocol.MAGIC * 50,
    ):
        with pytest.raises(Rejected):
            codec.open_batch(data + bytes(200), SWARM)
        with pytest.raises(Rejected):
            codec.open_announcement(data + bytes(200), SWARM)


def test_a_deep_peers_file_does_not_end_the_start(tmp_path: Path) -> None:
    """Hope: a peers.json that was passed on, nested a few thousand times, keeps a node from starting."""
    from sapo_node.swarm.peers import load_peers

    path = tmp_path / "peers.json"
    path.write_bytes(b'{"version":1,"x":' + b"[" * 5000 + b"]" * 5000 + b',"peers":[]}')
    assert load_peers(path)[0] == []


def test_a_deep_row_of_a_data_set_is_told_with_its_line(tmp_path: Path) -> None:
    """Hope: a data set from the internet ends the node with a traceback instead of its line."""
    from sapo_node.tasks.dataset import DatasetError, load

    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"question":"a","answer":"1","x":' + b"[" * 5000 + b"]" * 5000 + b"}\n")
    with pytest.raises(DatasetError, match=r"rows\.jsonl:1"):
        load(path)
