"""Messages of a private swarm: requests, answers and hints that prove its key, or do not."""

from random import Random
from typing import Final

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from sapo_node.swarm import secret as module
from sapo_node.swarm.secret import Conversation, Secret, Unproven

from . import values
from .mutate import mutate, random_bytes
from .run import Broken, Surface

_KEYS: Final = (b"k" * module.KEY_BYTES, b"old key" + bytes(module.KEY_BYTES - 7))
_ROOTS: Final = tuple(
    module._root(key, values.SWARM) for key in (*_KEYS, b"x" * module.KEY_BYTES)
)  # the last: no member
_ABOUT: Final = b"/sapo/1/fetch"
_PEERS: Final = values.OTHER.peer_id.encode(), values.ME.peer_id.encode()
_WORDS: Final = b"request", b"answer", b"hint"


def _context(kind: bytes, nonce: bytes) -> tuple[bytes, ...]:
    if kind == b"hint":
        return kind, _ABOUT, _PEERS[0]
    return (kind, _ABOUT, *_PEERS, *((nonce, bytes(4)) if kind == b"answer" else ()))


def _make(rng: Random) -> bytes:
    """A kind, and a message of that kind or of another, sealed by a member or not."""
    kind, sealed_as = rng.choice(_WORDS), rng.choice(_WORDS)
    content = random_bytes(rng, 200)
    if rng.random() < 0.7:
        sealed_as = kind
    if sealed_as == b"request":
        at = rng.choice((values.NOW, values.NOW, values.NOW - 100, values.NOW + 100, 1.8e16))
        content = rng.choice((int(at * 1000).to_bytes(8, "big"), b"", b"short")) + content
    nonce = rng.randbytes(module.NONCE_BYTES)
    key = module._key(rng.choice(_ROOTS), *_context(sealed_as, b"n" * module.NONCE_BYTES))
    sealed = nonce + ChaCha20Poly1305(key).encrypt(nonce, content, None)
    if rng.random() < 0.4:
        sealed = mutate(rng, sealed)
    return kind[:1] + (random_bytes(rng) if rng.random() < 0.1 else sealed)


def _feed(data: bytes) -> None:
    members = Secret(_KEYS, values.SWARM, lambda: values.NOW)
    about, asker, asked = _ABOUT.decode(), values.OTHER.peer_id, values.ME.peer_id
    kind, sealed = data[:1], data[1:]
    if kind == b"h":
        opened = members.open_hint(about, asker, sealed)
    elif kind == b"a":
        context = (_ABOUT, *_PEERS, b"n" * module.NONCE_BYTES)
        opened = Conversation(_ROOTS[0], context).read(sealed)
    else:
        opened, _ = members.heed(about, asker, asked, sealed)
        try:
            members.heed(about, asker, asked, sealed)
        except Unproven:
            pass
        else:
            raise Broken("a request was opened twice")
    if len(opened) > len(sealed) - module.OVERHEAD:
        raise Broken("more was read than was sealed")


SURFACES: Final = (
    Surface(
        name="sealed",
        reads="a message of a private swarm",
        make=_make,
        feed=_feed,
        refusals=(Unproven,),
    ),
)
