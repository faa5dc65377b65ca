"""The key of a private swarm: what is derived from it, and how messages are sealed with it. No network here.

Whoever holds the key is a member. Every name on the wire (protocols, gossip topics, DHT keys) is derived from it, and
every message is sealed with ChaCha20-Poly1305 under a key of its own purpose, so that a message proves the key and
shows nothing without it. What a message was made for goes into the derivation of its key: kind, protocol, both peers,
and for an answer the request and its place in the answer. So nothing that was captured opens anywhere else.

    root             HKDF-SHA256(ikm = key, salt = "sapo/1/private", info = swarm's name)
    key(p1, ...)     HKDF-Expand-SHA256(root, info = digest(p1, ...))
    sealed           nonce 12 | ciphertext | tag 16
    request          sealed(milliseconds since 1970, 8 bytes | data)      key("request", name, asker, asked)
    answer i         sealed(data)            key("answer", name, asker, asked, nonce of the request, i in 4 bytes)
    hint             sealed(data)            key("hint", topic, sender)
    name             "/" | hex of the first 16 bytes of key("name", public name)

A request opens once, within FRESH_SECONDS. libp2p has authenticated both peers of a connection, so a captured request
is worth nothing to anyone but the peer that made it. The file holds one key a line: the first seals, all open, and an
answer is sealed with the key of its request, so that a swarm can change its key while it runs.
"""

import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from sapo_node.errors import SapoError
from sapo_node.identity import read_private, write_private
from sapo_node.swarm.protocol import digest

log = logging.getLogger(__name__)

KEY_BYTES: Final = 32
MAX_KEYS: Final = 4
"""Keys in a file. Each is tried on every message and read under in the DHT; two do for a change of the key."""

MAX_FILE_BYTES: Final = 4096

NONCE_BYTES: Final = 12
OVERHEAD: Final = NONCE_BYTES + 16
REQUEST_OVERHEAD: Final = OVERHEAD + 8
"""Bytes that sealing adds to an answer or hint, and to a request."""

FRAME_BYTES: Final = 64 * 1024
"""Most bytes that are sealed as one; a longer part of an answer travels as several. Both ends must agree."""

FRESH_SECONDS: Final = 60.0
"""How old a request may be, or how far ahead: transit, and clocks that differ."""

MAX_SEEN: Final = 16_384
"""Requests remembered, so that none opens twice: 136 a second for as long as one could be fresh. Members alone can
fill it; of what falls out, a copy opens again while it is fresh."""

TELL_SECONDS: Final = 60.0
"""Between two warnings of a member whose clock differs."""

NAME_BYTES: Final = 16


class Unproven(ConnectionError):
    """Bytes that do not prove a key of this swarm, here and now. The text is fixed, safe to log."""


class SecretError(SapoError):
    """The file with the swarm's key cannot be used or written. The message names the file and the cure."""


@dataclass(slots=True)
class Conversation:
    """One request and its answers, numbered from 0, at either end."""

    root: bytes
    context: tuple[bytes, ...]
    count: int = 0

    def _next_key(self) -> bytes:
        self.count += 1
        return _key(self.root, b"answer", *self.context, (self.count - 1).to_bytes(4, "big"))

    def answer(self, data: bytes) -> bytes:
        """The next answer, sealed: OVERHEAD bytes longer."""
        return _seal(self._next_key(), data)

    def read(self, sealed: bytes) -> bytes:
        """What the next answer says. Raises Unproven if it is not the answer to this request."""
        data = _open(self._next_key(), sealed)
        if data is None:
            raise Unproven("the answer is not sealed with the swarm's key")
        return data


class Secret:
    """The keys of a private swarm, the first of which seals. Peers are given by their ids in text."""

    def __init__(self, keys: Sequence[bytes], swarm: str, now: Callable[[], float] = time.time) -> None:
        """`keys` have KEY_BYTES each."""
        self._roots = [_root(key, swarm) for key in keys]
        self._now = now
        self._seen: OrderedDict[bytes, float] = OrderedDict()  # nonces of requests, and when each came
        self._told_at = -TELL_SECONDS

    @classmethod
    def load(cls, path: Path, swarm: str) -> "Secret":
        """Read the keys in `path`. Raises SecretError, or IdentityError for a file that others can read."""
        return cls(parse(read_private(path, MAX_FILE_BYTES + 1, CURE), path), swarm)

    @property
    def keys(self) -> int:
        """How many keys open messages."""
        return len(self._roots)

    def names(self, name: str) -> list[str]:
        """What stands for a public name on the wire: for each key one, the first to be used by this node itself."""
        return ["/" + _key(root, b"name", name.encode())[:NAME_BYTES].hex() for root in self._roots]

    def ask(self, about: str, asker: str, asked: str, data: bytes) -> tuple[bytes, Conversation]:
        """A sealed request, REQUEST_OVERHEAD longer than `data`, and what opens its answers. `about` is the public
        name of what is asked for."""
        context = about.encode(), asker.encode(), asked.encode()
        at = int(self._now() * 1000).to_bytes(8, "big")
        sealed = _seal(_key(self._roots[0], b"request", *context), at + data)
        return sealed, Conversation(self._roots[0], (*context, sealed[:NONCE_BYTES]))

    def heed(self, about: str, asker: str, asked: str, sealed: bytes) -> tuple[bytes, Conversation]:
        """What a request that `asker` sent says, and what seals the answers. The caller bounds its size.

        Raises Unproven for a request that was not sealed with a key of this swarm, for another purpose or other peers,
        too long ago, or that came before.
        """
        context = about.encode(), asker.encode(), asked.encode()
        for root in self._roots:
            opened = _open(_key(root, b"request", *context), sealed)
            if opened is not None and len(opened) >= 8:
                self._check_fresh(asker, sealed[:NONCE_BYTES], int.from_bytes(opened[:8], "big") / 1000)
                return opened[8:], Conversation(root, (*context, sealed[:NONCE_BYTES]))
        raise Unproven("the request is not sealed with the swarm's key")

    def seal_hint(self, topic: str, sender: str, data: bytes) -> bytes:
        """A hint of `sender` for whoever listens to a topic, given by its public name."""
        return _seal(_key(self._roots[0], b"hint", topic.encode(), sender.encode()), data)

    def open_hint(self, topic: str, sender: str, sealed: bytes) -> bytes:
        """What a hint says. Raises Unproven."""
        for root in self._roots:
            data = _open(_key(root, b"hint", topic.encode(), sender.encode()), sealed)
            if data is not None:
                return data
        raise Unproven("the hint is not sealed with the swarm's key")

    def _check_fresh(self, asker: str, nonce: bytes, made_at: float) -> None:
        now = self._now()
        if not abs(now - made_at) <= FRESH_SECONDS:
            self._tell_of_clock(asker, made_at - now)
            raise Unproven("the request is not fresh")
        if nonce in self._seen:
            raise Unproven("the request came before")
        self._seen[nonce] = now
        while len(self._seen) > MAX_SEEN or abs(now - next(iter(self._seen.values()))) > 2 * FRESH_SECONDS:
            self._seen.popitem(last=False)

    def _tell_of_clock(self, asker: str, ahead: float) -> None:
        if time.monotonic() - self._told_at < TELL_SECONDS:
            return
        self._told_at = time.monotonic()
        log.warning(
            "%s has this swarm's key, but its clock is %.0f s %s this node's, so it gets no answer. Compare `date -u` "
            "on both machines, and run NTP.",
            asker,
            abs(ahead),
            "ahead of" if ahead > 0 else "behind",
        )


CURE: Final = "`sapo-node swarm-key` makes one, and all nodes of a swarm need the same"


def parse(content: bytes, path: Path) -> list[bytes]:
    """The keys in a file: one a line, 64 hexadecimal digits each; blank lines and those that begin with # do not count.
    Raises SecretError, which never shows what the file holds."""
    if len(content) > MAX_FILE_BYTES:
        raise SecretError(f"{path}: is larger than {MAX_FILE_BYTES} bytes; it holds one key a line")
    keys: list[bytes] = []
    for number, line in enumerate(content.splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith(b"#"):
            continue
        try:
            key = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES or len(text) != 2 * KEY_BYTES:
            raise SecretError(
                f"{path}: line {number} is no key, which is {2 * KEY_BYTES} random hexadecimal digits; {CURE}"
            )
        keys.append(key)
    if not keys:
        raise SecretError(f"{path}: holds no key; {CURE}")
    if len(keys) > MAX_KEYS or len(set(keys)) < len(keys):
        raise SecretError(f"{path}: holds more than {MAX_KEYS} keys, or one of them twice; remove those no longer used")
    return keys


def make(path: Path) -> None:
    """Write a new key to `path`, which must not exist, readable by its owner alone. Raises IdentityError."""
    write_private(path, f"{secrets.token_hex(KEY_BYTES)}\n".encode())


def _root(key: bytes, swarm: str) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=b"sapo/1/private", info=swarm.encode()).derive(key)


def _key(root: bytes, *parts: bytes) -> bytes:
    return HKDFExpand(algorithm=SHA256(), length=32, info=digest(*parts)).derive(root)


def _seal(key: bytes, data: bytes) -> bytes:
    # Random nonces: a key serves one pair of peers or one sender, far below the 2^32 messages they suffice for.
    nonce = os.urandom(NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, data, None)


def _open(key: bytes, sealed: bytes) -> bytes | None:
    if len(sealed) < OVERHEAD:
        return None
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None)
    except InvalidTag:
        return None
