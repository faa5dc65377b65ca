"""What travels between nodes, and nothing else: groups, the batch around them, and the announcement of a batch.

These structs are the wire format (docs/protocol.md). Unknown fields are ignored so that the next wire version can add
some. Sizes, signatures and meaning are checked elsewhere: bytes in `codec.py`, truth in `verify.py`.

Rewards are not here on purpose: a receiver computes its own.
"""

from typing import Literal

from msgspec import Struct

# What a task's configuration may hold. Flat on purpose: nothing a stranger sends can nest.
ConfigValue = bool | int | float | str | list[bool | int | float | str]

Finish = Literal["stop", "length"]


class TaskRef(Struct, frozen=True, kw_only=True):
    """Coordinates of one question: enough for anyone to regenerate it, too little to choose it.

    The random seed is not among them: it follows from these fields, the swarm and the sender's key
    (`swarm.protocol.question_seed`), so a sender cannot look for a question it likes.
    """

    source: Literal["reasoning_gym", "dataset"]
    version: str  # of the library, or the data set's content digest in hex
    name: str
    config_hash: bytes  # 32 bytes, sha256 of the canonical JSON of `config`
    config: dict[str, ConfigValue]
    epoch: int  # number of the swarm.protocol.EPOCH_SECONDS interval in which it was drawn
    index: int  # 0 .. swarm.protocol.MAX_INDEX - 1, gaps allowed


class Completion(Struct, frozen=True, kw_only=True):
    """One answer as text. Tokens do not travel: the receiver's tokenizer may be another."""

    text: str
    finish: Finish
    n_tokens: int  # in the sender's tokenizer, its end-of-sequence token included


class Group(Struct, frozen=True, kw_only=True):
    """One task and its L completions; the unit of exchange and of training."""

    task: TaskRef
    question_sha256: bytes  # 32 bytes, over the UTF-8 of the data set's question, before any template
    completions: list[Completion]
    sampled_at: float  # seconds since 1970, the sender's clock
    policy_version: int  # optimiser steps the sender's policy had taken when it sampled this group


class ModelCard(Struct, frozen=True, kw_only=True):
    """Whose words these are: lets a receiver filter by licence and show who is in the swarm."""

    name: str
    params: int
    licence: str
    tokenizer_sha256: bytes  # 32 bytes


class Batch(Struct, frozen=True, kw_only=True):
    """Up to `swarm.protocol.MAX_GROUPS` groups of one node, signed as one envelope."""

    proto: int
    swarm: str
    peer_id: str  # must equal the id derived from the envelope's key
    seq: int  # counts this node's batches, strictly rising, across restarts
    created_at: float
    model: ModelCard
    groups: list[Group]


class Listing(Struct, frozen=True, array_like=True):
    """One batch in an announcement. A tuple on the wire, since eight must fit into 1 KiB with the rest."""

    content_id: bytes  # 32 bytes, sha256 of the envelope's payload
    size: int  # bytes of the whole envelope
    groups: int
    created_at: float


class Announcement(Struct, frozen=True, kw_only=True):
    """A node's newest batches and where to fetch them. One DHT subkey a node and epoch; <= 1 KiB signed.

    `epoch`, `k` and `prefix` repeat the DHT key under which it is stored, so a record cannot be replayed elsewhere.
    """

    proto: int
    swarm: str
    epoch: int
    k: int
    prefix: int
    seq: int  # strictly rising a node, across restarts
    created_at: float
    version: str  # of sapo-node
    roles: list[str]
    addresses: list[str]  # multiaddrs without /p2p
    batches: list[Listing]
