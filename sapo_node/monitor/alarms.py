"""Alarms about what a policy learns: one answer that earns everywhere, a policy that collapses, one that drifts away.

All three look at numbers that this node measured itself. They are pure state machines: numbers and times in, alarms
that begin or end out; `watch.py` feeds them and does what follows from them. Their memory is bounded.

- `RewardHack`: of a task's recent rewards more than half go to one answer, on questions whose own true answer is
  another. Compared question by question, since a constant may be honest: "2" is a third of gcd's truths. Truths of
  these questions must differ among themselves too, or an answer that is only written otherwise ("yes", "Yes.") would
  pass for a hack. Own groups show it for the task, whoever sends it. Groups of one share of others show it for that
  share alone: a free key could make up whatever it wants an alarm about. Where peers of HACK_VOICES networks show the
  same, each by itself, it is so for the task with these settings. A peer speaks once: when it comes to count for
  another share, what it sent before is taken back. An answer that this node gave itself and that seldom earned is none:
  a scorer that takes 1 for 0.9 pays a weak policy that always says "1" most of its few rewards.
- `Collapse`: far fewer questions get any right answer than once did, or the policy has become sure of itself while it
  earns less than it did.
- `Drift`: fixed texts that belong to no task have become much less likely than at the start.

What gets worse by chance is not alarming: a share must have fallen by NOISE standard errors of its window as well. Each
alarm ends later than it began (hysteresis), so that none flickers.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from sapo_node.monitor.text import clean

# Reward hack.
HACK_GROUPS: Final = 64  # rewarded groups of a task that are looked at: some rounds of one task
HACK_ANSWERS: Final = 4  # of a group that are kept, those that earned most: one answer with half of all is among them
HACK_SHARE: Final = 0.5  # of all rewards, above which one answer is alarming
HACK_QUESTIONS: Final = 16  # distinct ones that it must have earned on: fewer may be luck
HACK_PAYS: Final = 0.25  # of the own questions that it was given to, a hack earns on so many at least
HACK_TRIES: Final = 16  # such questions before that is known, of HACK_TRIED at most; truths are others
HACK_TRIED: Final = 64
HACK_OVER_SHARE: Final = 0.25  # below which it is over, seen over HACK_FRESH groups since it began
HACK_FRESH: Final = 32
HACK_SECONDS: Final = 1800.0  # after which it is looked at again with others' groups
HACK_WINDOWS: Final = 256  # 40 kB each; of the network of others with most of them the quietest is forgotten first
HACK_VOICES: Final = 3  # networks of others (`PeerBook.network`) that must show it: fewer are one party too easily
HACK_VOICE_QUESTIONS: Final = 6  # distinct ones on which each of them must: all together HACK_QUESTIONS
HACK_ALARMS: Final = 64  # about groups of others that last at a time; one network's oldest ends for one more
SHOWN: Final = 40  # characters of an answer that are shown

# Collapse.
WINDOW: Final = 32  # rounds that a level is the mean of
NOISE: Final = 6.0  # standard errors: three for the level now, three for the best one, which luck has picked
ANY_RIGHT_FELL: Final = 0.5  # of its best
ANY_RIGHT_OVER: Final = 0.75
ENTROPY_FELL: Final = 0.2  # of its start
ENTROPY_OVER: Final = 0.3
REWARD_FELL: Final = 0.8  # of its best
REWARD_OVER: Final = 0.9

# Drift.
DRIFT_NATS: Final = 2.0  # a token below the start: each token has become seven times less likely
DRIFT_OVER: Final = 0.75  # of that, below which it is over

Kind = Literal["reward hack", "collapse", "drift"]


class Alarm(Struct, frozen=True, kw_only=True):
    """An alarm that begins, or one that is over."""

    kind: Kind
    subject: str  # the task of a reward hack, and which settings or share of others it is about; else empty
    begins: bool
    text: str  # a sentence for people


class Earned(Struct, frozen=True, kw_only=True):
    """What the answers of one group earned; a group without any reward has none."""

    question: bytes  # its sha256
    truth: bytes  # digest of its own true answer
    total: float  # rewards of all its answers
    answers: list[tuple[bytes, str, float]]  # digest, answer as it may be shown, its rewards; the HACK_ANSWERS best


def earned(question: bytes, truth: bytes, answers: Iterable[tuple[bytes, str, float]]) -> Earned | None:
    """From digest, text and reward of each answer of a group; None where nothing earned, or the truth is unknown."""
    rewards: Counter[bytes] = Counter()
    shown: dict[bytes, str] = {}
    for digest, text, reward in answers:
        if reward > 0:
            rewards[digest] += reward  # type: ignore[assignment]  # graded rewards are fractions
            shown[digest] = text
    if not rewards or not truth:
        return None
    best = [(digest, clean(shown[digest], SHOWN), float(sum_)) for digest, sum_ in rewards.most_common(HACK_ANSWERS)]
    return Earned(question=question, truth=truth, total=float(sum(rewards.values())), answers=best)


class _Suspect(Struct, frozen=True):
    """The answer that earns most on questions whose truth is another."""

    digest: bytes
    shown: str
    share: float  # of all rewards
    questions: int


class _Hacked(Struct, frozen=True):
    suspect: _Suspect
    since: float
    network: str = ""  # whose groups the alarm is about; empty where several showed it


class Sender(NamedTuple):
    """Whose groups are heard."""

    peer: str
    share: str  # `PeerBook.share`: what it is barred with
    network: str  # `PeerBook.network`: keys behind one relay may each be a share, and are one voice all the same


_OWN: Final = Sender("", "", "")


class _Window(Struct):
    """What one share, or this node, showed lately."""

    heard: deque[tuple[str, Earned]]  # with the peer that sent it
    network: str = ""
    suspect: _Suspect | None = None

    @property
    def groups(self) -> list[Earned]:
        return [group for _, group in self.heard]


class _About(NamedTuple):
    """Of a window: whose groups it holds. Of an alarm: which groups it is about; empty for all."""

    task: str
    settings: bytes = b""  # hash
    share: str = ""  # own groups have neither


class RewardHack:
    """Looks for one answer that earns on questions of a task whatever their truth is."""

    def __init__(self) -> None:
        self._windows: dict[_About, _Window] = {}  # the newest is the last
        self._hacked: dict[_About, _Hacked] = {}
        self._tries: dict[tuple[str, bytes], dict[bytes, deque[bool]]] = {}  # by task and settings: the newest is last

    def tried(self, task: str, settings: bytes, answers: Mapping[bytes, bool]) -> None:
        """Of one question that this node sampled: which answers beside the truth it gave, and whether each earned."""
        tries = self._tries.setdefault((task, settings), {})
        for digest, paid in answers.items():
            tries[digest] = known = tries.pop(digest, deque(maxlen=HACK_TRIED))
            known.append(paid)
        while len(tries) > HACK_TRIED:
            del tries[next(iter(tries))]

    def _seldom_pays(self, about: _About, answer: bytes) -> bool:
        """Whether own answers show that this one is no hack: with none of the settings it is about."""
        known = [
            tries[answer]
            for (task, settings), tries in self._tries.items()
            if task == about.task and about.settings in (b"", settings) and len(tries.get(answer, ())) >= HACK_TRIES
        ]
        return bool(known) and all(fmean(paid) < HACK_PAYS for paid in known)

    def lasts(self, task: str, settings: bytes = b"", share: str = "") -> bool:
        """Whether an alarm lasts about a task, about it with these settings (their hash), or as this share sends it."""
        about = (_About(task), _About(task, settings), _About(task, share=share))
        return any(one in self._hacked for one in about)

    def own(self, task: str, group: Earned, now: float) -> list[Alarm]:
        """One more rewarded group that this node sampled. `now` in seconds, of any clock."""
        about = _About(task)
        window = self._heard(about, group, _OWN)
        hacked = self._hacked.get(about)
        if hacked is None:
            suspect = window.suspect
            if suspect is None or suspect.questions < HACK_QUESTIONS or self._seldom_pays(about, suspect.digest):
                return []
            self._forget(about)  # whether it is over is told by what comes from now on
            return [self._begin(about, suspect, now)]
        share = _share(window.groups, hacked.suspect.digest)
        if len(window.heard) >= HACK_FRESH and share < HACK_OVER_SHARE:
            return [self._end(about, f"its share of the rewards is now {share:.0%}")]
        return []

    def others(self, task: str, settings: bytes, sender: Sender, group: Earned, now: float) -> list[Alarm]:
        """One more rewarded group of others."""
        about, share = _About(task, settings, sender.share), sender.share
        self._leave_elsewhere(about, sender.peer)
        said = self._heard(about, group, sender).suspect
        if said is None or self.lasts(task, settings, share) or self._seldom_pays(about, said.digest):
            return []
        voices, networks = [], set[str]()
        for one, window in self._windows.items():
            found = window.suspect if one[:2] == (task, settings) and one.share else None
            if found and found.digest == said.digest and found.questions >= HACK_VOICE_QUESTIONS:
                voices.append(found)
                networks.add(window.network)
        network = sender.network
        if len(networks) >= HACK_VOICES:
            network = ""
            mean, questions = fmean(voice.share for voice in voices), sum(voice.questions for voice in voices)
            about, said = _About(task, settings), _Suspect(said.digest, said.shown, mean, questions)
            self._forget(about)
        elif said.questions >= HACK_QUESTIONS:
            about = _About(task, share=share)
        else:
            return []
        ended = self._make_room()
        return [*ended, self._begin(about, said, now, network)]

    def look_again(self, now: float) -> list[Alarm]:
        """End alarms that have lasted for HACK_SECONDS: with others' groups a hack that goes on is seen again."""
        old = [about for about, hacked in self._hacked.items() if now - hacked.since >= HACK_SECONDS]
        return [self._end(about, "others' groups are looked at again") for about in old]

    def _make_room(self) -> list[Alarm]:
        """For one more alarm about others, end one of the network with most: keys are free, networks less so."""
        theirs = [(about, hacked.network) for about, hacked in self._hacked.items() if about.settings or about.share]
        if len(theirs) < HACK_ALARMS:
            return []
        most, _ = Counter(network for _, network in theirs).most_common(1)[0]
        oldest = next(about for about, network in theirs if network == most)
        return [self._end(oldest, "there are newer ones")]

    def _heard(self, about: _About, group: Earned, sender: Sender) -> _Window:
        """The window of these with one more group in it."""
        window = self._windows.pop(about, None) or _Window(deque(maxlen=HACK_GROUPS))
        self._windows[about] = window
        window.heard.append((sender.peer, group))
        window.network = sender.network
        window.suspect = _suspect(window.groups)
        if len(self._windows) > HACK_WINDOWS:  # own ones stay: they are as many as the mixture has tasks
            kept = Counter(one.network for one in self._windows.values() if one.network)
            for network, _ in kept.most_common(1):
                del self._windows[next(key for key, one in self._windows.items() if one.network == network)]
        return window

    def _leave_elsewhere(self, about: _About, peer: str) -> None:
        """A peer speaks once: what it sent while it counted for another share is taken back."""
        for one, window in list(self._windows.items()):
            if one[:2] != about[:2] or one.share in ("", about.share) or all(who != peer for who, _ in window.heard):
                continue
            window.heard = deque([word for word in window.heard if word[0] != peer], maxlen=HACK_GROUPS)
            window.suspect = _suspect(window.groups)
            if not window.heard:
                del self._windows[one]

    def _forget(self, about: _About) -> None:
        """Forget the windows that an alarm is about."""
        for one in list(self._windows):
            same_settings = about.settings in (b"", one.settings)
            if one.task == about.task and same_settings and about.share in ("", one.share):
                del self._windows[one]

    def _begin(self, about: _About, suspect: _Suspect, now: float, network: str = "") -> Alarm:
        self._hacked[about] = _Hacked(suspect, now, network)
        text = (
            f"reward hack in {_subject(about)}: {suspect.share:.0%} of rewards, over {suspect.questions} questions, "
            f'went to the one answer "{suspect.shown}", which is not theirs. Others\' groups like these are left aside '
            f"for a while; take {about.task} out of tasks.mixture if its scorer pays for that answer"
        )
        return Alarm(kind="reward hack", subject=_subject(about), begins=True, text=text)

    def _end(self, about: _About, why: str) -> Alarm:
        suspect, subject = self._hacked.pop(about).suspect, _subject(about)
        self._forget(about)
        text = f'the alarm about "{suspect.shown}" in {subject} is over: {why}'
        return Alarm(kind="reward hack", subject=subject, begins=False, text=text)


def _subject(about: _About) -> str:
    if about.share:
        return f"{about.task} from {about.share}"
    return f"{about.task} with settings {about.settings.hex()[:8]}" if about.settings else about.task


def _share(window: Iterable[Earned], answer: bytes) -> float:
    """Of all rewards in a window, what an answer earned where it is not the truth."""
    groups = list(window)
    won = sum(reward for group in groups for digest, _, reward in group.answers if digest == answer != group.truth)
    return won / sum(group.total for group in groups)


def _suspect(window: Iterable[Earned]) -> _Suspect | None:
    """The answer that has more than HACK_SHARE of the rewards, on questions whose truths differ from it and among
    themselves; None where there is none."""
    groups = list(window)
    won: defaultdict[bytes, float] = defaultdict(float)
    shown: dict[bytes, str] = {}
    truths: defaultdict[bytes, dict[bytes, bytes]] = defaultdict(dict)  # by answer: question to its truth
    for group in groups:
        for digest, text, reward in group.answers:
            if digest != group.truth:
                won[digest] += reward
                shown[digest] = text
                truths[digest][group.question] = group.truth
    for digest in won:
        if max(Counter(truths[digest].values()).values()) > len(truths[digest]) / 2:
            won[digest] = 0.0  # one truth, written otherwise
    if not won:
        return None
    best = max(won, key=won.__getitem__)
    share = won[best] / sum(group.total for group in groups)
    return _Suspect(best, shown[best], share, len(truths[best])) if share > HACK_SHARE else None


class Levels(Struct, frozen=True, kw_only=True):
    """What a round's own groups say about the policy that sampled them."""

    groups: int
    any_right: float  # share of the groups with any right answer
    reward: float  # mean over all completions, 0 to 1
    entropy: float | None  # nats a token; None: the engine told no log-probs


class Fallen(Struct, kw_only=True):
    """What `Collapse` remembers beside its window; it survives a restart."""

    best_any_right: float = 0.0
    best_reward: float = 0.0
    start_entropy: float | None = None
    lasts: bool = False


class Collapse:
    """Compares the last WINDOW rounds with the best ones before, and with the first ones."""

    def __init__(self, memory: Fallen | None = None) -> None:
        self.memory = memory or Fallen()
        self._window: deque[Levels] = deque(maxlen=WINDOW)

    def add(self, levels: Levels) -> list[Alarm]:
        """One more round with own groups."""
        self._window.append(levels)
        if len(self._window) < WINDOW:
            return []
        groups = sum(one.groups for one in self._window)
        any_right = sum(one.any_right * one.groups for one in self._window) / groups
        reward = sum(one.reward * one.groups for one in self._window) / groups
        entropies = [one.entropy for one in self._window if one.entropy is not None]
        entropy = fmean(entropies) if entropies else None
        memory = self.memory
        if memory.start_entropy is None:
            memory.start_entropy = entropy
        memory.best_any_right = max(memory.best_any_right, any_right)
        memory.best_reward = max(memory.best_reward, reward)

        def fell(now: float, best: float, part: float) -> bool:
            noise = 0.0 if memory.lasts else NOISE * math.sqrt(best * (1 - best) / groups)
            return now < part * best and best - now > noise

        lasts = memory.lasts
        wrong = fell(any_right, memory.best_any_right, ANY_RIGHT_OVER if lasts else ANY_RIGHT_FELL)
        sure = (
            entropy is not None
            and memory.start_entropy is not None
            and entropy < (ENTROPY_OVER if lasts else ENTROPY_FELL) * memory.start_entropy
            and fell(reward, memory.best_reward, REWARD_OVER if lasts else REWARD_FELL)
        )
        if (wrong or sure) == lasts:
            return []
        memory.lasts = not lasts
        numbers = (
            f"a right answer to {any_right:.0%} of its questions (best {memory.best_any_right:.0%}), a mean reward of "
            f"{reward:.3f} (best {memory.best_reward:.3f})"
        )
        if entropy is not None and memory.start_entropy is not None:
            numbers += f", {entropy:.3f} nats of entropy a token (at the start {memory.start_entropy:.3f})"
        return [Alarm(kind="collapse", subject="", begins=memory.lasts, text=_collapse_text(memory.lasts, numbers))]


def _collapse_text(begins: bool, numbers: str) -> str:
    if begins:
        return (
            f"the policy seems to collapse: over {WINDOW} rounds it had {numbers}. J is halved until it has recovered; "
            "if it does not, lower training.lr or go back to an older checkpoint"
        )
    return f"the policy has recovered: {numbers}"


class Strayed(Struct, kw_only=True):
    """What `Drift` remembers; it survives a restart."""

    start: float | None = None  # nats a token
    lasts: bool = False


class Drift:
    """Compares the log-prob of fixed texts with that of the first measurement.

    A model that gave them less than chance at the start does not know such texts (the embedded ones know tasks only);
    how far below chance they lie is then an accident that moves as far in honest training, so it is allowed on top. The
    embedded demo model fell by up to 2.8 nats in 400 honest rounds at its default rate, and 4.3 are allowed to it.
    """

    def __init__(self, memory: Strayed | None = None) -> None:
        self.memory = memory or Strayed()

    def add(self, logprob: float, chance: float) -> list[Alarm]:
        """One more measurement: mean log-prob a token, and what it were if all tokens were equally likely."""
        memory = self.memory
        if memory.start is None:
            memory.start = logprob
        limit = (DRIFT_NATS + max(0.0, chance - memory.start)) * (DRIFT_OVER if memory.lasts else 1.0)
        fell = memory.start - logprob
        if (fell > limit) == memory.lasts:
            return []
        memory.lasts = not memory.lasts
        numbers = f"{logprob:.2f} nats a token, {memory.start:.2f} at the start"
        text = (
            f"the policy drifts: plain texts that belong to no task have become much less likely to it ({numbers}). It "
            "shares no groups until it is back; go back to an older checkpoint, or lower training.lr or set "
            "training.kl_coef"
            if memory.lasts
            else f"the policy is back near its start ({numbers}); its groups are shared again"
        )
        return [Alarm(kind="drift", subject="", begins=memory.lasts, text=text)]
