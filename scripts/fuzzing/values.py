"""Valid messages to begin from: batches, announcements, coordinates, with keys that the fuzzer holds itself."""

import asyncio
import atexit
import hashlib
import shutil
import tempfile
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from sapo_node.identity import Identity
from sapo_node.rollouts.schema import Announcement, Batch, Completion, Group, Listing, ModelCard, TaskRef
from sapo_node.swarm import protocol
from sapo_node.swarm.records import shard_prefix
from sapo_node.tasks import catalog
from sapo_node.tasks.base import config_hash

SWARM: Final = "fuzz"
EPOCH: Final = 59_000_000
NOW: Final = EPOCH * protocol.EPOCH_SECONDS + 10.0

FOLDER: Final = Path(tempfile.mkdtemp(prefix="sapo-fuzz-"))
"""For the surfaces that read files."""

LOOP: Final = asyncio.new_event_loop()
"""For the surfaces that wait."""

atexit.register(LOOP.close)
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

_TEXTS: Final = ("4", "", "<answer>12</answer>", "Ω ≠ \u202e", "a long answer " * 30)


def identity(name: str) -> Identity:
    """A key that follows from its name, so that an input is the same in every run."""
    secret = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())
    public = secret.public_key().public_bytes_raw()
    path = FOLDER / f"{name}.key"
    path.touch(0o600)
    path.write_bytes(bytes.fromhex("08011240") + secret.private_bytes_raw() + public)
    return Identity.load(path)


ME: Final = identity("me")
OTHER: Final = identity("other")


def batch(rng: Random) -> Batch:
    """A valid batch of ME."""
    count = rng.choice((1, 1, 2, 5))
    return Batch(
        proto=protocol.PROTO,
        swarm=SWARM,
        peer_id=ME.peer_id,
        seq=rng.randrange(1000),
        created_at=NOW,
        model=ModelCard(name="tiny", params=rng.randrange(10**9), licence="mit", tokenizer_sha256=bytes(32)),
        groups=[group(rng, index) for index in range(count)],
    )


def group(rng: Random, index: int) -> Group:
    """A valid group at an index."""
    return Group(
        task=task(rng, index),
        question_sha256=rng.randbytes(32),
        completions=[
            Completion(text=rng.choice(_TEXTS), finish=rng.choice(("stop", "length")), n_tokens=rng.randrange(100))
            for _ in range(rng.choice((2, 3, 8)))
        ],
        sampled_at=NOW,
        policy_version=rng.randrange(1000),
    )


def task(rng: Random, index: int) -> TaskRef:
    """Coordinates with settings that the catalogue mostly allows."""
    name = rng.choice(list(catalog.OFFERED))
    config = settings(rng, name)
    return TaskRef(
        source="reasoning_gym",
        version=catalog.library_version(),
        name=name,
        config_hash=config_hash(config),
        config=config,
        epoch=EPOCH,
        index=index,
    )


def settings(rng: Random, name: str) -> dict[str, Any]:
    """Some of a task's settings, each within its own range; whether they go together is the catalogue's to say."""
    chosen = {}
    for key, declared in catalog.OFFERED[name].fields.items():
        if rng.random() < 0.5:
            chosen[key] = value_of(rng, declared)
    return chosen


def value_of(rng: Random, declared: catalog.Field) -> Any:
    """A value that a field allows, its ends more often than what lies between."""
    if isinstance(declared, catalog.Int):
        return rng.choice((declared.low, declared.high, rng.randint(declared.low, declared.high)))
    if isinstance(declared, catalog.Real):
        return rng.choice((declared.low, declared.high, rng.uniform(declared.low, declared.high)))
    if isinstance(declared, catalog.Flag):
        return rng.random() < 0.5
    if isinstance(declared, catalog.Choice):
        return rng.choice(declared.words)
    return rng.sample(declared.default, rng.randint(1, len(declared.default)))


def announcement(rng: Random, signer: Identity = ME) -> Announcement:
    """A valid announcement, in its signer's shard."""
    k = rng.randrange(4)
    return Announcement(
        proto=protocol.PROTO,
        swarm=SWARM,
        epoch=EPOCH,
        k=k,
        prefix=shard_prefix(signer.public_key, EPOCH, k),
        seq=rng.randrange(10**6),
        created_at=NOW,
        version="0.1.0",
        roles=rng.choice(([], ["bootstrap"])),
        addresses=["/ip4/192.0.2.7/tcp/4001"] * rng.randrange(3),
        batches=[Listing(rng.randbytes(32), 500 + n, 1 + n, NOW) for n in range(rng.randrange(4))],
    )


def plain(value: msgspec.Struct) -> Any:
    """The builtin types that a struct is on the wire."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
