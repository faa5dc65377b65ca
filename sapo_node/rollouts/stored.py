"""Completions as they lie in the pool's file: one BLOB a group."""

from array import array
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from sapo_node.rollouts.schema import Finish
from sapo_node.training.base import TrainCompletion


class _Stored(Struct, array_like=True):
    """A completion in the BLOB: numbers as machine arrays, quicker and smaller than msgpack's."""

    text: str
    finish: Finish
    token_ids: bytes | None  # uint32
    logprobs: bytes | None  # float32, what engines compute in
    policy_versions: list[int] = []


_decoder: Final = msgspec.msgpack.Decoder(list[_Stored])


def pack_completions(completions: Sequence[TrainCompletion]) -> bytes:
    return msgspec.msgpack.encode(
        [
            _Stored(
                c.text,
                c.finish,
                None if c.token_ids is None else array("I", c.token_ids).tobytes(),
                None if c.logprobs is None else array("f", c.logprobs).tobytes(),
                c.policy_versions,
            )
            for c in completions
        ]
    )


def unpack_completions(blob: bytes) -> list[TrainCompletion]:
    return [
        TrainCompletion(
            text=s.text,
            finish=s.finish,
            token_ids=None if s.token_ids is None else array("I", s.token_ids).tolist(),
            logprobs=None if s.logprobs is None else array("f", s.logprobs).tolist(),
            policy_versions=s.policy_versions,
        )
        for s in _decoder.decode(blob)
    ]
