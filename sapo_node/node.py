"""The daemon: startup, main loop, drain, shutdown; nothing else.

What it runs: the sampling and the training loop (training/rounds.py), the swarm (swarm/service.py) with the check of
what arrives (rollouts/arrivals.py), and the status file. Signals: the first SIGTERM or SIGINT drains (no new sampling,
the current step ends, a checkpoint is written, within `node.drain_seconds`), the second ends at once.
"""

import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

from sapo_node import fit, machine, malloc, scratch, stop_signal
from sapo_node.config import NodeConfig
from sapo_node.config_load import Loaded
from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.evaluate import HeldOut, NothingHeldOut, Stopped
from sapo_node.identity import Identity
from sapo_node.inference.base import EngineStatus
from sapo_node.inference.choice import Chosen, choose_engine, with_engine
from sapo_node.inference.paired import PairedPolicy
from sapo_node.monitor import history
from sapo_node.monitor import log as logging_setup
from sapo_node.monitor.counters import SwarmCounters
from sapo_node.monitor.metrics import EvalRecord, EventRecord, Record, RoundRecord
from sapo_node.monitor.status import REWARD_ROUNDS, NodeStatus, State, StatusFile
from sapo_node.monitor.watch import Watch, conditions
from sapo_node.rollouts.arrivals import Arrivals
from sapo_node.rollouts.pool import Pool, PoolError
from sapo_node.rollouts.sampling import Sampling
from sapo_node.rollouts.schema import ModelCard
from sapo_node.swarm.service import SwarmService
from sapo_node.tasks import mixture
from sapo_node.tasks.scoring import ScorerPool
from sapo_node.training import checkpoint
from sapo_node.training.rounds import RoundEvents, Rounds, mean, until
from sapo_node.training.supervised import Policy, PolicyLost
from sapo_node.workers import CallFailed, Refused, WorkerError

log = structlog.get_logger(__name__)

LOG_EVERY_SECONDS: Final = 2.0  # rounds of a small model end faster than anybody reads
STATUS_SECONDS: Final = 1.0
ALONE_AFTER_SECONDS: Final = 5.0  # a node that starts with the others is not told that it is alone at once
SHUTDOWN_SECONDS: Final = 10.0
RESTART_PAUSE_SECONDS: Final = (1.0, 60.0)  # first and longest pause before a failed service starts again


def run(loaded: Loaded) -> int:
    """Run a node until it ends; the exit code. Raises SapoError for what its owner can cure."""
    config = loaded.config
    logging_setup.setup(config.monitor.log_level, config.monitor.log_format)
    data = DataDir(config.node.data_dir)
    with data.lock():
        if sys.platform == "win32":
            raise SapoError("sapo-node runs on Linux and macOS; on Windows use WSL2")
        import uvloop

        here = machine.look()
        fit.check_start(config, here)
        engine = choose_engine(config.inference.engine, here)
        malloc.one_arena()
        with scratch.temporary_files(data.path):
            return int(uvloop.run(Node(with_engine(config, engine), data, engine).run()))


class Node:
    """One node, from start to end."""

    def __init__(self, config: NodeConfig, data: DataDir, engine: Chosen) -> None:
        """`data` is locked by the caller, and `config` fits the `engine`."""
        self._config = config
        self._engine = engine
        self._data = data
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._started_at = time.time()
        self._state: State = "starting"
        self._reason = ""
        self._asked = asyncio.Event()  # by a signal to stop
        self._drawing: asyncio.Task[None] | None = None
        self._swarm: SwarmService | None = None
        self._new_key = not data.key.exists()
        self._identity = Identity.load_or_create(data.key)
        self._history = history.History(data.history, config.monitor.max_history_bytes)
        self._status_file = StatusFile(data.status, STATUS_SECONDS)
        self._rng = random.Random(config.node.seed)
        self._rewards: list[float] = []
        self._held_out: float | None = None
        self._held_out_start: float | None = None
        self._own_groups = 0
        self._external_used = 0
        self._shortage = 0
        self._last_line = float("-inf")
        self._eval_seconds = 0.0
        self._saved_version: int | None = None  # None until the counters are those of the policy
        self._evaluated_version = -1
        self._watch = Watch(
            config.tasks.eval_every,
            began=lambda text: self._remember("alarm", text),
            ended=lambda text: self._remember("alarm over", text),
        )

    # -- life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Live until max_rounds, a signal or a fault; the exit code."""
        stop_signal.listen(asyncio.get_running_loop(), self._on_signal)
        life = asyncio.create_task(self._life(), name="life")
        forced = asyncio.create_task(self._force.wait(), name="forced")
        await asyncio.wait({life, forced}, return_when=asyncio.FIRST_COMPLETED)
        if not life.done():
            log.warning("ending at once; the round in progress is lost", reason=self._reason)
            life.cancel()
            await asyncio.wait({life}, timeout=SHUTDOWN_SECONDS)
            return 1
        forced.cancel()
        return life.result()

    def _on_signal(self) -> None:
        if self._asked.is_set():
            self._reason = "a second signal came"
            self._force.set()
            return
        log.info("stopping: the current step ends and a checkpoint is written; a second signal ends at once")
        self._stop.set()
        self._asked.set()
        self._end_sampling()
        self._set_state("draining", "a signal asked it to stop")
        asyncio.get_running_loop().call_later(self._config.node.drain_seconds, self._drain_took_too_long)

    def _drain_took_too_long(self) -> None:
        self._reason = f"draining took longer than node.drain_seconds ({self._config.node.drain_seconds:g} s)"
        self._force.set()

    async def _life(self) -> int:
        async with contextlib.AsyncExitStack() as stack:
            self._remember("started", f"process {os.getpid()}")
            fault: BaseException | None = None
            showing = asyncio.create_task(self._keep("status", self._status_loop), name="status")
            stack.callback(showing.cancel)
            try:
                if await until(self._stop, self._startup(stack)):
                    await self._main_loop()
            except* Exception as group:  # noqa: BLE001  raised again below, once what was learnt is kept
                fault = _first(group)
                await self._rescue()
        if fault is not None:
            reason = str(fault) or type(fault).__name__
            self._set_state("stopped", reason)
            self._remember("failed", reason)
            log.error("the node ends", reason=reason)
            if isinstance(fault, SapoError | Refused | WorkerError):
                return 1
            raise fault  # of this program, to be told with its traceback
        self._set_state("stopped", "it was asked to stop" if self._asked.is_set() else "it has taken its rounds")
        self._remember("stopped", self._reason)
        log.info("stopped", reason=self._reason)
        return 0

    async def _rescue(self) -> None:
        """Keep what was learnt since the last checkpoint, if the policy still answers."""
        if self._saved_version is None or not self._policy.alive:
            return  # of a start that failed: a good checkpoint would get counters that begin anew
        try:
            async with asyncio.timeout(self._config.node.drain_seconds):
                await self._checkpoint()
        except (TimeoutError, SapoError) as error:
            log.error("no checkpoint could be written at the end", reason=str(error) or "it took too long")

    # -- startup ------------------------------------------------------------------------------------------------------

    async def _startup(self, stack: contextlib.AsyncExitStack) -> bool:
        """Bring everything up, children side by side; `stack` takes it down again."""
        config = self._config
        self._status()
        log.info("starting", peer_id=self._identity.peer_id, data_dir=str(self._data.path), swarm=config.swarm.name)
        if self._new_key:
            log.warning("a new key was made: to others this is a new node", file=str(self._data.key))
        tasks = mixture.load(config.tasks)
        self._tell_withheld(tasks)
        self._pool = await Pool.open(self._data.pool, config.rollouts)
        stack.push_async_callback(self._pool.close)
        self._scorers = ScorerPool(config.tasks.scorers, config.tasks.answer_seconds, config.tasks.answer_form)
        stack.push_async_callback(self._scorers.close)
        log.info("engine", engine=self._engine.engine, reason=self._engine.reason)
        kind = PairedPolicy if self._engine.engine == "vllm" else Policy
        self._policy = kind(config, self._data.checkpoints, self._forget_lost_line)
        self._policy.checks_memory = True
        stack.push_async_callback(self._policy.close)
        self._swarm = SwarmService(config, self._identity, self._data) if config.swarm.enabled else None
        if self._swarm is not None:
            self._swarm.check_ports()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._scorers.start(), name="scorers")
            group.create_task(self._policy.start(), name="policy")
        for layer in self._scorers.missing_protection:
            log.warning("a layer of the sandbox around strangers' answers is missing", layer=layer)
        self._restore_own_state(conditions(tasks, config))
        await self._watch.measure(self._policy)
        self._tell_model()
        self._held = await HeldOut.prepare(config, tasks, self._scorers)
        if self._held.left_out:
            log.warning("too few held-out questions: left out of the held-out score", tasks=self._held.left_out)
        publish = self._swarm.publish if self._swarm is not None else None
        pool, watch = self._pool, self._watch
        sampling = Sampling(
            config, self._identity, tasks, self._scorers, self._policy, pool, self._rng, publish, watch=watch
        )
        events, known, useless = RoundEvents(recorded=self._on_round, network=dict), None, None
        if self._swarm is not None:
            book = self._swarm.book
            self._arrivals = Arrivals(config, self._identity, tasks, self._scorers, pool, book, watch=watch)
            events = RoundEvents(recorded=self._on_round, network=SwarmCounters(self._swarm, self._arrivals))
            known, useless = book.standing, book.useless
        paced = (config, self._policy, sampling, pool, self._rng, self._stop, events)
        self._rounds = Rounds(*paced, standing=known, watch=watch, useless=useless)
        await self._pool.expire(time.time(), self._policy.version, config.training.staleness)
        return True

    async def _forget_lost_line(self) -> None:
        """The policy went back to a checkpoint: own groups of the steps that are lost must not pass for new ones."""
        await self._pool.expire(time.time(), self._policy.version, self._config.training.staleness)

    def _tell_withheld(self, tasks: mixture.Mixture) -> None:
        for entry in tasks.entries:
            if entry.rows is not None:
                log.info(
                    "data set loaded", task=entry.spec.name, rows=len(entry.rows.rows), withheld=entry.rows.withheld
                )

    def _tell_model(self) -> None:
        info = self._policy.info
        assert info is not None
        log.info(
            "policy loaded",
            model=info.name,
            params=info.params,
            lr=info.lr,
            device=info.device,
            version=self._policy.version,
        )
        for note in info.notes:
            log.warning(note)

    def _restore_own_state(self, asked: str) -> None:
        newest = checkpoint.latest(self._data.checkpoints)
        self._saved_version = -1 if newest is None else self._policy.version
        if newest is None:
            self._watch.restore(None, asked)
            return
        extra = checkpoint.read_state(newest).extra
        version, internal, gauss = extra["rng"]
        self._rng.setstate((version, tuple(internal), gauss))
        self._own_groups, self._external_used = extra["own_groups"], extra["external_used"]
        if self._watch.restore(extra.get("alarms"), asked):  # else the first score was one of other questions
            self._held_out_start = extra["held_out_start"]
        log.info("resumed", checkpoint=newest.name)
        self._remember("resumed", newest.name)

    # -- main loop ----------------------------------------------------------------------------------------------------

    async def _main_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            services = []
            if self._swarm is not None:
                services.append(group.create_task(self._keep("swarm", self._run_swarm)))
            await self._evaluate(self._stop)
            self._set_state("joining" if self._swarm is not None else "silo")
            self._drawing = group.create_task(self._rounds.sampling_loop(), name="sampling")
            await self._rounds.training_loop()
            self._set_state("draining", self._reason)
            self._end_sampling()
            await self._checkpoint()
            await self._last_evaluation()
            for service in services:
                service.cancel()

    def _end_sampling(self) -> None:
        """What waits to be sampled is called off, what is being sampled is interrupted."""
        if self._drawing is not None:
            self._drawing.cancel()
        policy: Policy | None = getattr(self, "_policy", None)
        if policy is not None:
            policy.interrupt()

    async def _run_swarm(self) -> None:
        assert self._swarm is not None
        info = self._policy.info
        assert info is not None
        card = ModelCard(
            name=info.name, params=info.params, licence=info.licence, tokenizer_sha256=info.tokenizer_sha256
        )
        await self._swarm.run(self._pool, card, self._arrivals.want, self._arrivals.consume)

    async def _keep(self, name: str, service: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a service for ever; one that fails is named and started again after a growing pause."""
        pause, longest = RESTART_PAUSE_SECONDS
        while True:
            started = time.monotonic()
            try:
                await service()
            except Exception as error:
                cause = _first(error)
                if isinstance(cause, PoolError):  # a full disk passes
                    log.error(
                        "a service failed and is started again", service=name, reason=str(cause), in_seconds=pause
                    )
                elif isinstance(cause, SapoError):
                    raise cause from error
                else:
                    log.exception("a service failed and starts again", service=name, in_seconds=pause)
            if time.monotonic() - started > longest:
                pause = RESTART_PAUSE_SECONDS[0]
            await asyncio.sleep(pause)
            pause = min(longest, 2 * pause)

    async def _on_round(self, record: RoundRecord) -> None:
        record = await self._watch.close(record, self._policy)
        self._own_groups += record.groups_drawn
        self._external_used += record.external_groups
        self._shortage = record.shortage
        if record.reward_first_drawn is not None:
            self._rewards = [*self._rewards, record.reward_first_drawn][-REWARD_ROUNDS:]
        self._record(record)
        self._log_round(record)
        settings = self._config
        if record.round % settings.training.checkpoint_every == 0:
            await self._checkpoint()
        every = settings.tasks.eval_every
        if every and record.round % every == 0 and not self._stop.is_set():
            await self._evaluate(self._stop)

    def _log_round(self, record: RoundRecord) -> None:
        now = time.monotonic()
        if now - self._last_line < LOG_EVERY_SECONDS:
            return
        self._last_line = now
        log.info(
            "round",
            round=record.round,
            reward_first_drawn=mean(self._rewards),
            local=record.local_groups,
            external=record.external_groups,
            informative=record.informative_groups,
            peers=record.peers,
            held_out=self._held_out,
            seconds=record.round_seconds,
        )

    # -- evaluation and checkpoints -----------------------------------------------------------------------------------

    async def _evaluate(self, stop: asyncio.Event | None) -> None:
        """Measure the held-out score, unless `stop` comes first; there is none without questions, or when the policy is
        lost. Without a `stop` it waits for new weights no longer than a quarter of the time to drain."""
        try:
            if stop is None:
                async with asyncio.timeout(self._config.node.drain_seconds / 4):
                    await self._policy.settled()
            else:
                await until(stop, self._policy.settled())
            record = await self._held.score(self._policy, self._scorers, round=self._policy.version, stop=stop)
        except Stopped:
            return
        except TimeoutError:
            log.warning("no held-out score at the end", reason="new weights did not reach vLLM in time")
            return
        except NothingHeldOut as error:
            log.warning("no held-out score", reason=str(error))
            return
        except (PolicyLost, WorkerError) as error:
            if stop is not None and stop.is_set():
                return  # interrupted
            log.warning("no held-out score this time", reason=str(error))
            return
        self._keep_score(record)

    def _keep_score(self, record: EvalRecord) -> None:
        self._held_out = record.mean
        if self._held_out_start is None:
            self._held_out_start = record.mean
        self._evaluated_version = record.policy_version
        self._eval_seconds = record.seconds or 0.0
        self._record(record)
        log.info("held-out score", score=record.mean, start=self._held_out_start, round=record.round)

    async def _last_evaluation(self) -> None:
        """The score at the end. A node that has taken its rounds takes the time for it, until a signal comes; one that
        was asked to stop does without where it does not fit into half of the time that draining may take."""
        asked = self._asked.is_set()
        fits = not asked or 2 * self._eval_seconds < self._config.node.drain_seconds
        if fits and self._policy.version != self._evaluated_version:
            await self._evaluate(None if asked else self._asked)

    async def _checkpoint(self) -> None:
        if self._saved_version == self._policy.version:
            return
        extra = {
            "rng": self._rng.getstate(),
            "own_groups": self._own_groups,
            "external_used": self._external_used,
            "held_out_start": self._held_out_start,
            "alarms": self._watch.memory(),
        }
        try:
            saved = await self._policy.save(extra)
        except (PolicyLost, CallFailed) as error:
            log.error("no checkpoint could be written; training goes on", reason=str(error))
            self._remember("checkpoint failed", str(error))
            return
        self._saved_version = saved.policy_version
        self._remember("checkpoint", saved.path)

    # -- what people see ----------------------------------------------------------------------------------------------

    async def _status_loop(self) -> None:
        alone_since = time.monotonic()
        while True:
            if self._swarm is not None and self._state in ("joining", "training", "silo"):
                if self._swarm.peers:
                    alone_since = time.monotonic()
                    if self._state != "training":
                        self._set_state("training")
                        self._remember("joined", f"{self._swarm.peers} other nodes of this swarm were heard")
                elif self._state != "silo" and time.monotonic() - alone_since > ALONE_AFTER_SECONDS:
                    self._set_state("silo", "nobody else of this swarm was heard")
                    self._remember("alone", self._reason)
                    log.info("You are alone in this swarm; training continues.")
            self._status()
            await asyncio.sleep(STATUS_SECONDS)

    def _set_state(self, state: State, reason: str = "") -> None:
        if self._state == "draining" and state != "stopped":
            return
        if state != self._state:
            self._state, self._reason = state, reason
            self._status()

    def _status(self) -> None:
        policy: Policy | None = getattr(self, "_policy", None)
        engine = policy.engine if policy else EngineStatus(name="", state="")
        rounds: Rounds | None = getattr(self, "_rounds", None)
        swarm = self._swarm
        status = NodeStatus(
            pid=os.getpid(),
            state=self._state,
            started_at=self._started_at,
            updated_at=time.time(),
            round=policy.version if policy else 0,
            policy_version=policy.version if policy else 0,
            peer_id=self._identity.peer_id,
            addresses=swarm.addresses if swarm else [],
            peers=swarm.peers if swarm else 0,
            found=swarm.book.counts() if swarm else {},
            unreached=swarm.unreached if swarm else [],
            own_groups=self._own_groups,
            external_groups_used=self._external_used,
            reward_first_drawn=mean(self._rewards),
            held_out=self._held_out,
            held_out_start=self._held_out_start,
            shortage=self._shortage,
            reason=(rounds.waiting if rounds else "") or self._reason,
            engine=engine.name,
            engine_state=engine.state,
            engine_restarts=engine.restarts,
            sync_faults=engine.sync_faults,
            model=policy.info.name if policy and policy.info else self._config.training.model,
            swarm=self._config.swarm.name if self._config.swarm.enabled else "",
            **self._watch.status(),
        )
        self._on_disk("node.json", lambda: self._status_file.write(status))

    def _remember(self, event: str, text: str) -> None:
        policy = getattr(self, "_policy", None)
        self._record(EventRecord(event=event, time=time.time(), round=policy.version if policy else 0, text=text))

    def _record(self, record: Record) -> None:
        self._on_disk("history.jsonl", lambda: self._history.append(record))

    def _on_disk(self, name: str, write: Callable[[], object]) -> None:
        """Records are for people: a full disk is told, and training goes on without them."""
        try:
            write()
        except OSError as error:
            log.warning("a record could not be written", file=name, reason=str(error))


def _first(error: BaseException) -> BaseException:
    """The first error in a group of groups, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
