"""Hostile inputs: bytes changed without knowing what they mean, and structures changed with that knowledge.

Everything draws from the `random.Random` passed in, so a seed repeats an input exactly.
"""

import math
from random import Random
from typing import Any, Final

import msgspec

Value = Any  # what msgpack and JSON carry

_NUMBERS: Final = (0, 1, 2, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 2**31, 2**32 - 1)
_HOSTILE_TEXTS: Final = (
    "",
    "\0",
    "\x1b[2J\x1b]0;owned\x07",
    "\u202e\u2066gnp.exe",
    "\r\n{}",
    "../../etc/passwd",
    "<answer>1</answer>",
    "$(reboot)",
    "{0.__class__}",
    "%s%n",
    "İ" * 40,
    "\U0010ffff",
    "x" * 300,
    "9" * 5000,
)


def random_bytes(rng: Random, most: int = 400) -> bytes:
    """Up to `most` bytes, short ones often."""
    return rng.randbytes(int(most * rng.random() ** 3))


def mutate(rng: Random, data: bytes, other: bytes = b"") -> bytes:
    """`data` with one to four changes that know nothing of its meaning; `other` is spliced in at times."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, changed, other)
    return bytes(changed)


def _change(rng: Random, data: bytearray, other: bytes) -> None:
    at = rng.randrange(len(data) + 1)
    size = rng.choice((1, 1, 2, 4, 8, 32))
    kind = rng.randrange(8)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1 and at < len(data):
        data[at] = rng.choice((0x00, 0x7F, 0x80, 0xFF, 0xC1, 0xC7, 0xDF, rng.randrange(256)))
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        del data[at : at + size]
    elif kind == 4:
        data[at:at] = rng.randbytes(size)
    elif kind == 5:
        data[at:at] = bytes(data[at : at + size]) * rng.choice((1, 2, 50))
    elif kind == 6:
        number = rng.choice(_NUMBERS)
        width = rng.choice((1, 2, 4, 8))
        data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, rng.choice(("big", "little")))
    elif other:
        start = rng.randrange(len(other))
        data[at:] = other[start:]


def hostile(rng: Random, depth: int = 3) -> Value:
    """A value that no honest sender puts anywhere, or one of a type that does not belong there."""
    kind = rng.randrange(9 if depth else 7)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice((-1, 1)) * rng.choice((*_NUMBERS, 2**53 - 1, 2**53, 2**63 - 1))
    if kind == 2:
        return rng.choice((math.nan, math.inf, -math.inf, 0.5, -0.0, 1e308, 5e-324, 1e18))
    if kind == 3:
        return rng.choice(_HOSTILE_TEXTS)
    if kind == 4:
        return rng.randbytes(rng.choice((0, 1, 31, 32, 33, 300)))
    if kind == 5:
        return [rng.choice((0, "a", b"b", None))] * rng.choice((0, 1, 33, 65, 5000))
    if kind == 6:
        return {f"key {i}": i for i in range(rng.choice((0, 1, 33, 400)))}
    if kind == 7:
        return [hostile(rng, depth - 1) for _ in range(rng.randrange(4))]
    nested: Value = hostile(rng, 0)
    for _ in range(rng.choice((2, 15, 17, 300))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def twist(rng: Random, value: Value) -> Value:
    """A structure of builtin types with one change somewhere inside: a part replaced, gone, doubled or added."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        changed = dict(value)
        kind = rng.randrange(10)
        if kind == 0:
            del changed[key]
        elif kind == 1:
            changed[rng.choice(_HOSTILE_TEXTS)] = hostile(rng)
        else:
            changed[key] = twist(rng, value[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        kind = rng.randrange(8)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return value + [value[at]] * rng.choice((1, 7, 40))
        return [*value[:at], twist(rng, value[at]), *value[at + 1 :]]
    return hostile(rng)


def packed(value: Value) -> bytes:
    """msgpack of any value that `hostile` makes."""
    return msgspec.msgpack.encode(value)


def tokens(rng: Random) -> bytes:
    """A run of msgpack headers whose lengths and counts lie: deep, huge, cut short, of extension types."""
    out = bytearray()
    for _ in range(rng.choice((1, 3, 30, 300))):
        tag = rng.choice((0x80, 0x81, 0x8F, 0x91, 0x9F, 0xA5, 0xC1, 0xC4, 0xC6, 0xC7, 0xC9, 0xCB, 0xCF, 0xD4, 0xD8))
        tag = rng.choice((tag, 0xD9, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, rng.randrange(256)))
        out.append(tag)
        if rng.random() < 0.5:
            out += rng.choice((b"\0", b"\xff" * 4, b"\0\0\xff\xff", b"\xff" * 8, rng.randbytes(4)))
    return bytes(out)
