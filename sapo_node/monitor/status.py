"""node.json: what a node is doing now, for `sapo-node status` and the live table. Written whole or not at all."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

FILE_NAME = "node.json"

State = Literal["starting", "joining", "training", "silo", "serving", "draining", "stopped"]

REWARD_ROUNDS = 10  # rounds in the moving average of `reward_first_drawn`: one round of a few groups is mostly noise


class StatusUnreadable(Exception):
    """node.json is there but is not a node's status; the message says which file and what is wrong."""


class NodeStatus(Struct, frozen=True, kw_only=True):
    """A node at one moment."""

    pid: int
    """Process of the node."""

    state: State
    """starting, joining, training, silo (no peers; it trains on), serving (a bootstrap peer), draining or stopped."""

    started_at: float
    """Seconds since 1970."""

    updated_at: float
    """Seconds since 1970; a running node renews it at least every few seconds."""

    round: int = 0
    """Rounds taken, restarts included."""

    policy_version: int = 0
    """Optimiser steps of the policy."""

    peer_id: str = ""
    """Derived from the node's key."""

    addresses: list[str] = []
    """Full multiaddrs (.../p2p/...) that others can join by."""

    peers: int = 0
    """Peers of this swarm that announced groups within the last epochs and have not left since."""

    role: str = "trainer"
    """trainer, or bootstrap: it only helps others to find each other."""

    found: dict[str, int] = {}
    """Members of the swarm that are connected now, by how this node met them."""

    unreached: list[str] = []
    """Sentences on ways to join that lead nowhere now, each with its address; at most 8."""

    own_groups: int = 0
    """Groups sampled by this node, over all rounds."""

    external_groups_used: int = 0
    """Groups of others trained on, over all rounds."""

    reward_first_drawn: float | None = None
    """Mean reward of the groups drawn first, over the last REWARD_ROUNDS rounds."""

    held_out: float | None = None
    """Newest held-out score, 0 to 1."""

    held_out_start: float | None = None
    """Held-out score at the start."""

    shortage: int = 0
    """External groups missing to J in the last round."""

    reason: str = ""
    """Why it is in this state, takes no rounds, or stopped; a sentence for people."""

    engine: str = ""
    """What samples completions: vllm or transformers."""

    engine_state: str = ""
    """What the engine is doing, or why it does not run."""

    engine_restarts: int = 0
    """How often the engine was started again by this process."""

    sync_faults: int = 0
    """Exchanges of weights that failed, or after which the engine's log-probs were not the trainer's; each was mended
    by a restart of the engine."""

    alarms: list[str] = []
    """Alarms about what the policy learns that last now, a sentence each (`alarms.py`)."""

    entropy_sampled: float | None = None
    """Newest one of this process; as in a round's record."""

    any_right: float | None = None
    """Newest one of this process; as in a round's record."""

    repeated: float | None = None
    """Newest one of this process; as in a round's record."""

    text_logprob: float | None = None
    """Newest one of this process; as in a round's record."""

    text_logprob_start: float | None = None
    """The first one of the node's life, which the drift alarm compares with."""

    model: str = ""
    """Name of the policy's model."""

    swarm: str = ""
    """Name of the swarm."""


class StatusFile:
    """The writing end of node.json: at most one write an interval, a change of state always at once."""

    def __init__(self, path: Path, interval: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`interval` in seconds. Nothing is written yet."""
        self._path = path
        self._interval = interval
        self._clock = clock
        self._written_at = float("-inf")
        self._state: State | None = None

    def write(self, status: NodeStatus, *, now: bool = False) -> bool:
        """Replace node.json unless that was done less than an interval ago; True when it was.

        `now` writes in any case, as at the end. Raises OSError (disk full, folder gone); the old file then stays.
        """
        due = self._clock() - self._written_at >= self._interval
        if not (due or now or status.state != self._state):
            return False
        # No fsync: after a power cut an old status is as good as none, and a second of training is worth more.
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(status), indent=2) + b"\n")
        os.replace(temporary, self._path)
        self._written_at = self._clock()
        self._state = status.state
        return True


def read_status(path: Path) -> NodeStatus | None:
    """The status in `path`, None where there is no file. Raises StatusUnreadable, or OSError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=NodeStatus)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StatusUnreadable(
            f"{path} is not the status of a node ({error}); it is rewritten when the node starts"
        ) from error
