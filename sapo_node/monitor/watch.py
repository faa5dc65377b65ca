"""What the alarms see of a running node, and what the node does about them.

Every own group passes `own`, every one of others that was verified `external`; a round's end is told by `close`, with
the record of the round, which gets its numbers on the policy here. While an alarm lasts, `bars` (others' groups of a
task are left aside), `limit` (J is halved) and `shares` (own groups are not published) say what follows.

A checkpoint keeps the levels that later ones are compared with, and under which `conditions` they were measured:
levels of other questions say nothing about the policy. The windows start anew with the process: a reward hack is seen
again within some rounds.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import structlog
from msgspec import Struct, structs

from sapo_node.config import NodeConfig, TrainingSection
from sapo_node.monitor.alarms import Alarm, Collapse, Drift, Fallen, Levels, RewardHack, Sender, Strayed, earned
from sapo_node.monitor.metrics import RoundRecord
from sapo_node.rollouts.pool import NewGroup
from sapo_node.swarm.protocol import digest
from sapo_node.tasks.base import answer_digest, extract_answer
from sapo_node.tasks.mixture import Mixture
from sapo_node.training.base import TextScore
from sapo_node.training.supervised import PolicyLost
from sapo_node.workers import WorkerError

log = structlog.get_logger(__name__)

REMEMBERED_TEXTS: Final = 4096  # own completions with which later ones are compared, 0.5 MB; the oldest go first
MEASURE_EVERY: Final = 20  # rounds between two looks at the fixed texts where `tasks.eval_every` is 0


class Scorable(Protocol):
    """What is needed of the policy."""

    async def score_texts(self) -> TextScore:
        """How likely the fixed texts are to it. May raise PolicyLost or WorkerError."""
        ...


class _Sums(Struct):
    """Of own groups since the last round."""

    groups: int = 0
    any_right: int = 0
    completions: int = 0
    repeated: int = 0
    rewards: float = 0.0  # means of groups, added up
    tokens: int = 0
    surprise: float = 0.0  # -log-prob of these tokens when they were sampled


class Memory(Struct, kw_only=True):
    """What a checkpoint keeps."""

    collapse: Fallen
    drift: Strayed
    conditions: str = ""  # of the levels in `collapse`; the fixed texts of `drift` are the same whatever is asked


def conditions(tasks: Mixture, config: NodeConfig) -> str:
    """A digest of all but the policy that decides what its groups earn, how sure of itself it seems in them, and what
    it scores on held-out questions."""
    of_tasks = [
        (entry.spec.source, entry.spec.name, entry.spec.version, entry.spec.config_hash, entry.weight, entry.verifier)
        for entry in tasks.entries
    ]
    sampler, asked = config.inference, config.tasks
    how = (sampler.temperature, sampler.max_completion_tokens, sampler.system_prompt, asked.curriculum)
    many = (config.rollouts.completions_per_task, asked.eval_questions)
    return digest(repr((of_tasks, how, many, asked.answer_form)).encode()).hex()


class Watch:
    """The alarms of one node."""

    def __init__(
        self,
        measure_every: int = 0,
        began: Callable[[str], None] = lambda text: None,
        ended: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`measure_every` counts rounds; 0: MEASURE_EVERY. `began` and `ended` are told the sentence of an alarm.
        `clock` tells seconds, from whenever."""
        self._every = measure_every or MEASURE_EVERY
        self._began, self._ended, self._clock = began, ended, clock
        self._hack, self._collapse, self._drift = RewardHack(), Collapse(), Drift()
        self._lasting: dict[tuple[str, str], str] = {}  # kind and subject to its sentence
        self._sums = _Sums()
        self._texts: dict[int, None] = {}  # hashes, the oldest first
        self._newest: dict[str, float | None] = {}
        self._conditions = ""

    # -- what it is shown ---------------------------------------------------------------------------------------------

    def own(self, groups: Sequence[NewGroup]) -> None:
        """Groups that this node sampled and judged."""
        for group in groups:
            answers = _answers(group)
            self._hack.tried(group.task.name, group.task.config_hash, _tried(answers, group.truth))
            if (found := earned(group.question_sha256, group.truth, answers)) is not None:
                self._tell(self._hack.own(group.task.name, found, self._clock()))
            sums, texts = self._sums, [hash(completion.text) for completion in group.completions]
            sums.groups += 1
            sums.any_right += any(reward > 0 for reward in group.rewards)
            sums.rewards += sum(group.rewards) / max(1, len(group.rewards))
            sums.completions += len(texts)
            sums.repeated += sum(text in self._texts for text in texts)
            for text in texts:
                self._texts.pop(text, None)
                self._texts[text] = None
            while len(self._texts) > REMEMBERED_TEXTS:
                del self._texts[next(iter(self._texts))]
            for completion in group.completions:
                if completion.logprobs is not None:
                    sums.tokens += len(completion.logprobs)
                    sums.surprise -= sum(completion.logprobs)

    def external(self, groups: Sequence[NewGroup], sender: Sender) -> None:
        """Groups of another that were verified and judged here."""
        for group in groups:
            if (found := earned(group.question_sha256, group.truth, _answers(group))) is not None:
                self._tell(self._hack.others(group.task.name, group.task.config_hash, sender, found, self._clock()))

    def look_again(self) -> None:
        """End the alarms about others' groups that have lasted long enough. Also to be called while no round ends."""
        self._tell(self._hack.look_again(self._clock()))

    async def close(self, record: RoundRecord, policy: Scorable) -> RoundRecord:
        """A round is over: its record with the numbers on the policy. Looks at the fixed texts every some rounds."""
        self.look_again()
        sums, self._sums = self._sums, _Sums()
        entropy = sums.surprise / sums.tokens if sums.tokens else None
        numbers: dict[str, float | None] = {}
        if sums.groups:
            any_right, reward = sums.any_right / sums.groups, sums.rewards / sums.groups
            levels = Levels(groups=sums.groups, any_right=any_right, reward=reward, entropy=entropy)
            self._tell(self._collapse.add(levels))
            numbers = {
                "entropy_sampled": entropy,
                "any_right": any_right,
                "repeated": sums.repeated / max(1, sums.completions),
            }
        self._newest |= numbers
        if record.round % self._every == 0:
            numbers["text_logprob"] = await self.measure(policy)
        return structs.replace(record, **numbers)

    async def measure(self, policy: Scorable) -> float | None:
        """Look at the fixed texts: their mean log-prob a token, None where the policy was lost. The first look of a
        node's life is what later ones are compared with."""
        try:
            score = await policy.score_texts()
        except (PolicyLost, WorkerError) as error:
            log.warning("how far the policy has drifted could not be measured this time", reason=str(error))
            return None
        if not score.tokens:
            return None
        self._newest["text_logprob"] = score.mean_logprob
        self._tell(self._drift.add(score.mean_logprob, score.chance))
        return score.mean_logprob

    def _tell(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            key = (alarm.kind, alarm.subject)
            if alarm.begins:
                self._lasting[key] = alarm.text
                log.warning(alarm.text)
                self._began(alarm.text)
            else:
                self._lasting.pop(key, None)
                log.info(alarm.text)
                self._ended(alarm.text)

    # -- what follows -------------------------------------------------------------------------------------------------

    def bars(self, task: str, settings: bytes = b"", share: str = "") -> bool:
        """Whether others' groups of a task are left aside: all of them, those with these settings (their hash), or
        those of this share."""
        return self._hack.lasts(task, settings, share)

    def limit(self, training: TrainingSection) -> TrainingSection:
        """The settings of a round: as they are, or with half of J while the policy seems to collapse."""
        if not self._collapse.memory.lasts:
            return training
        least = 0 if training.local_groups else 1  # there is something to train on
        return training.model_copy(update={"external_groups": max(least, training.external_groups // 2)})

    @property
    def shares(self) -> bool:
        """Whether own groups are published."""
        return not self._drift.memory.lasts

    @property
    def lasting(self) -> list[tuple[str, str]]:
        """Kind and subject (`Alarm`) of the alarms that last."""
        return list(self._lasting)

    # -- what people and checkpoints are told -------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """NodeStatus' fields on the policy."""
        return {**self._newest, "text_logprob_start": self._drift.memory.start, "alarms": list(self._lasting.values())}

    def memory(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        memory = Memory(collapse=self._collapse.memory, drift=self._drift.memory, conditions=self._conditions)
        values: dict[str, Any] = msgspec.to_builtins(memory)
        return values

    def restore(self, values: Mapping[str, Any] | None, conditions: str = "") -> bool:
        """Go on from `memory` under the `conditions` of now; whether they are those of then. None: there is no memory,
        so levels are compared with the next ones; those for collapse also where conditions were others."""
        self._conditions = conditions
        if values is None:
            return False
        memory = msgspec.convert(values, Memory)
        if memory.conditions != conditions:
            log.info("tasks or sampling have changed: the alarm about collapse begins anew")
            memory.collapse = Fallen()
        self._collapse, self._drift = Collapse(memory.collapse), Drift(memory.drift)
        for kind, lasts in (("collapse", memory.collapse.lasts), ("drift", memory.drift.lasts)):
            if lasts:
                self._lasting[kind, ""] = f"the alarm about {kind} goes on from before the restart"
        return memory.conditions == conditions


def _answers(group: NewGroup) -> list[tuple[bytes, str, float]]:
    """Digest, text and reward of each answer of a group."""
    texts = [extract_answer(completion.text) for completion in group.completions]
    return [(answer_digest(text), text, reward) for text, reward in zip(texts, group.rewards, strict=True)]


def _tried(answers: Sequence[tuple[bytes, str, float]], truth: bytes) -> dict[bytes, bool]:
    """The answers beside the truth, and whether each earned; none where the truth is unknown."""
    found: dict[bytes, bool] = {}
    for answer, _, reward in answers:
        if truth and answer != truth:
            found[answer] = found.get(answer, False) or reward > 0
    return found


class Unwatched(Watch):
    """No alarms: it looks at nothing, so nothing follows."""

    def own(self, groups: Sequence[NewGroup]) -> None:
        """Not looked at."""

    def external(self, groups: Sequence[NewGroup], sender: Sender) -> None:
        """Not looked at."""
