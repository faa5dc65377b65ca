"""Which tasks are in quarantine: those in which peers worth believing compute other questions than this node.

A group whose question has another hash is ignored, whatever the cause: a wrong seed, a lie, or a library that differs
from ours although its version has the same name. One such group says nothing. But when peers that have agreed with this
node for a day, on other tasks, disagree about one task, and none of them agrees, then every group of that task will
come to nothing, and each costs a scorer. So others' groups of it are ignored for a time. This node's own go on: its
questions and truths are still its own.

Identities are free, so what counts is who speaks:

- Only *trusted* peers are heard: a day of accepted history (`History.aged`), and an agreement about another task since
  this node started, which shows that the rest of their library is ours. Any number of new identities is not even
  written down.
- A network has one voice: peers of one network (`History.network`) count once. A peer has one voice as well, wherever
  it was reached when it spoke: its newest word is its only one.
- One trusted peer that agrees outweighs all that do not, for as long as its word is fresh. Trusted peers are judged
  during a quarantine too, so that such a word can end it: who would switch a task off needs every trusted peer.

Everything is computed from the times passed in (seconds since 1970), and every table has an end.
"""

from collections import Counter, OrderedDict
from typing import Final, NamedTuple, Protocol

VOICES: Final = 3
"""Networks that must disagree. With one or two, whoever owns two networks and a day of patience could judge alone; a
swarm of four nodes has three others."""

FRESH_SECONDS: Final = 3600.0
"""How long a word counts: a peer sends each of its tasks many times an hour."""

QUARANTINE_SECONDS: Final = 1800.0
"""How long a task stays switched off. Afterwards its groups are judged as before, and new words are needed."""

MAX_WORDS: Final = 64
"""Peers whose words are remembered for each task: far more than VOICES, so that late words still refresh the early
ones. Of the network with most of them the oldest goes first."""

MAX_PEERS: Final = 1024
"""Trusted peers whose agreements are remembered; the least recently heard goes first."""

MAX_TASKS: Final = 128
"""Tasks with words about them. More than are offered; the least recently disputed goes first."""


class History(Protocol):
    """What is needed of the peer book."""

    def aged(self, peer_id: str, now: float) -> bool:
        """Whether this peer's groups have been accepted here for a day or more."""
        ...

    def network(self, peer_id: str) -> str:
        """The network or relay by which a peer is reached; peers with the same one are taken for one."""
        ...


class _Word(NamedTuple):
    """What a peer said last of a task."""

    network: str  # by which it was reached then
    said: float


class Quarantine:
    """Words of trusted peers about tasks, and the tasks that are switched off."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._agreed: OrderedDict[str, list[str]] = OrderedDict()  # peer -> its newest two tasks of agreement
        self._confirmed: dict[str, float] = {}  # task -> when a trusted peer last agreed
        self._disputed: OrderedDict[str, OrderedDict[str, _Word]] = OrderedDict()  # task -> peer -> its word
        self._until: dict[str, float] = {}

    def tasks(self, now: float) -> list[str]:
        """Names of the tasks in quarantine."""
        return sorted(task for task, until in self._until.items() if _before(now, until))

    def bars(self, task: str, peer_id: str, now: float) -> bool:
        """Whether a group of this task by this peer is ignored unseen."""
        until = self._until.get(task)
        return until is not None and _before(now, until) and not self._history.aged(peer_id, now)

    def agreed(self, task: str, peer_id: str, now: float) -> None:
        """A group of this peer was accepted: it asks the same question as this node."""
        if not self._history.aged(peer_id, now):
            return
        self._confirmed[task] = now
        self._until.pop(task, None)
        if len(self._confirmed) > MAX_TASKS:
            del self._confirmed[min(self._confirmed, key=self._confirmed.__getitem__)]
        others = [other for other in self._agreed.pop(peer_id, []) if other != task]
        self._agreed[peer_id] = [*others[-1:], task]
        if len(self._agreed) > MAX_PEERS:
            self._agreed.popitem(last=False)

    def disagreed(self, task: str, peer_id: str, now: float) -> bool:
        """A group of this peer had another question than this node's. True if that began a quarantine."""
        if not self._is_heard(task, peer_id, now):
            return False
        words = self._disputed.pop(task, OrderedDict())
        words.pop(peer_id, None)
        words[peer_id] = _Word(self._history.network(peer_id), now)
        if len(words) > MAX_WORDS:
            [(loudest, _)] = Counter(word.network for word in words.values()).most_common(1)
            del words[next(peer for peer, word in words.items() if word.network == loudest)]
        self._disputed[task] = words
        if len(self._disputed) > MAX_TASKS:
            self._disputed.popitem(last=False)
        return self._judge(task, words, now)

    def _is_heard(self, task: str, peer_id: str, now: float) -> bool:
        elsewhere = any(other != task for other in self._agreed.get(peer_id, ()))
        return elsewhere and self._history.aged(peer_id, now)

    def _judge(self, task: str, words: OrderedDict[str, _Word], now: float) -> bool:
        running = task in self.tasks(now)
        confirmed = self._confirmed.get(task)
        if running or (confirmed is not None and _fresh(confirmed, now)):
            return False
        if len({word.network for word in words.values() if _fresh(word.said, now)}) < VOICES:
            return False
        self._until = {name: until for name, until in self._until.items() if _before(now, until)}
        self._until[task] = now + QUARANTINE_SECONDS
        del self._disputed[task]
        return True


def _fresh(said: float, now: float) -> bool:
    return abs(now - said) <= FRESH_SECONDS  # by the distance: a clock that was set back makes no word last for ever


def _before(now: float, until: float) -> bool:
    return until - QUARANTINE_SECONDS <= now < until
