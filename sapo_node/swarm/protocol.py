"""Every constant of the wire, each with what breaks if it changes, and the few digests that all nodes must agree on.

Two nodes whose values differ do not understand each other, or understand each other wrongly. A change here is a new
`PROTO` unless the comment says otherwise. The document for other implementations is docs/protocol.md.
"""

import hashlib
from typing import Final

PROTO: Final = 1
"""Wire version. A node reads this one and, for one release, the one before. Others ignore what they cannot read."""

MAGIC: Final = b"SAPO"
"""First bytes of an envelope. Another value: every batch is malformed to everyone else."""

BATCH_TAG: Final = b"sapo-batch/1\0"
ANNOUNCEMENT_TAG: Final = b"sapo-announcement/1\0"
"""Domain separation of signatures: what was signed as one kind never verifies as another. Other values: all
signatures are forged to everyone else."""

EPOCH_SECONDS: Final = 30
"""Length of a discovery epoch. Other values: nodes look under keys where nobody announces."""

MAX_AGE_SECONDS: Final = 300
"""Default age at which a batch is stale; also how far back an announcement's epoch may lie. A receiver's setting may
be smaller; a larger one finds nothing more."""

MAX_EPOCHS_AHEAD: Final = 1
"""Clock skew that a receiver forgives, in epochs."""

MAX_INDEX: Final = 4096
"""Indices a task has in one epoch. Larger indices are rejected: with unbounded ones a sender could search for
questions that it likes."""

MAX_GROUPS: Final = 32
MIN_COMPLETIONS: Final = 2
MAX_COMPLETIONS: Final = 64
MAX_TEXT_BYTES: Final = 64 * 1024
MAX_ENVELOPE_BYTES: Final = 1024 * 1024
MAX_DECODED_BYTES: Final = 8 * 1024 * 1024
MAX_NESTING: Final = 16
"""Limits of a batch, checked before decoding. A sender beyond a receiver's limits is rejected and loses score, so
raising one needs a new PROTO."""

MAX_ITEMS: Final = 65_536
MAX_INTEGER: Final = 2**53 - 1
MAX_NAME_CHARS: Final = 64
MAX_CONFIG_ENTRIES: Final = 32
MAX_CONFIG_LIST: Final = 32
MAX_CONFIG_TEXT: Final = 256
"""More limits of a batch: msgpack values in all (the largest valid batch has fewer; more would only cost the
receiver time), integers that every language holds exactly, characters of a name, version or licence, entries of a
task's configuration, values in a list there, characters of a key or text there. Raising one needs a new PROTO."""

MAX_ROLES: Final = 8
MAX_ADDRESSES: Final = 8
MAX_ADDRESS_CHARS: Final = 128
"""Limits inside an announcement; a record beyond them is rejected. Raising one needs a new PROTO."""

MAX_RECORD_BYTES: Final = 1024
"""A signed announcement in the DHT. hivemind replies over 4 MiB crash the holder, so records and dictionaries stay
small; holders refuse larger ones."""

MAX_LISTINGS: Final = 8
"""Batches in one announcement; more would not fit into MAX_RECORD_BYTES."""

MAX_EXPIRY_EPOCHS: Final = 10
"""How far ahead a record may expire. Holders refuse later ones: they would stay for ever."""

MAX_SUBKEYS: Final = 256
"""Records a holder keeps under one DHT key. Local, but all nodes should agree, else shards split too late."""

SHARD_SPLIT_ABOVE: Final = 64
SHARD_MERGE_BELOW: Final = 16
MAX_SHARD_BITS: Final = 16
"""When the number of prefix bits k rises and falls (median records a shard in the last epoch). Readers look at k-1, k
and k+1, so nodes whose thresholds differ by more than one bit lose sight of each other."""

FETCH_PROTOCOL: Final = "/sapo/1/fetch"
"""libp2p protocol id of the batch stream. Another value: no fetch succeeds."""

HELLO_PROTOCOL: Final = "/sapo/hello"
"""libp2p protocol id of the greeting. It has no version, and never changes: by it nodes of different versions learn
that they are. Another value: nodes take each other for strangers and do not join by each other."""


def digest(*parts: bytes) -> bytes:
    """sha256 over length-prefixed parts (4 bytes big endian each), so that no two part lists collide; 32 bytes."""
    h = hashlib.sha256()
    for part in parts:
        h.update(len(part).to_bytes(4, "big"))
        h.update(part)
    return h.digest()


def question_seed(swarm: str, public_key: bytes, epoch: int, name: str, config_hash: bytes, index: int) -> int:
    """The seed (31 bits) of a question from its coordinates and the sender's key. It cannot be set, only sought by
    trying other settings or keys."""
    parts = (swarm.encode(), public_key, epoch.to_bytes(8, "big"), name.encode(), config_hash, index.to_bytes(4, "big"))
    return int.from_bytes(digest(b"sapo/1/seed", *parts)[:4], "big") & 0x7FFFFFFF


def epoch_of(timestamp: float) -> int:
    """Number of the epoch that holds a timestamp (seconds since 1970)."""
    return int(timestamp // EPOCH_SECONDS)


def hint_topic(swarm: str) -> str:
    """Gossip topic of a swarm's announcements. Another value: hints reach nobody, and batches travel by the DHT."""
    return f"sapo/1/{swarm}"


def greeting(swarm: str, oldest: int = PROTO, newest: int = PROTO) -> bytes:
    """What a node says of itself first, 38 bytes: the wire versions it reads, and a digest of its swarm's name. Its
    form holds for all versions."""
    return MAGIC + bytes([oldest, newest]) + digest(b"sapo/hello", swarm.encode())


def rendezvous_name(swarm: str) -> str:
    """What the nodes of a swarm provide in the public DHT of libp2p. Another value: nodes do not meet there."""
    return f"sapo/1/rendezvous/{swarm}"


def content_cid(name: str) -> bytes:
    """The content id of a name in the public DHT of libp2p: CIDv1, raw, sha2-256, 36 bytes."""
    return bytes.fromhex("01551220") + hashlib.sha256(name.encode()).digest()
