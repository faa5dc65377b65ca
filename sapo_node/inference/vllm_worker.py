"""The inference worker: vLLM's AsyncLLM in a process of its own, answering the node on uvloop.

It samples with the newest weights it was given, also while the trainer steps. New weights arrive in flight: sampling
pauses, the weights are exchanged, the version is set, sampling goes on with the requests that were running. vLLM counts
which tokens of a completion were sampled under which version.

After each exchange the log-probs of a fixed prompt are computed here, for comparison with the trainer's: some ways in
which an exchange fails are silent. Judging them, and ending this process when they differ, is the node's part.

Log-probs are vLLM's processed ones, with nothing cut off the distribution: what the importance ratio divides by.
"""

import asyncio
import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from typing import Any, Final

import uvloop
from transformers import AutoTokenizer
from vllm import AsyncEngineArgs, SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from sapo_node import workers
from sapo_node.config import InferenceSection
from sapo_node.inference import base
from sapo_node.inference.base import Nothing, Probe, Sampled, SampledBatch, StartRequest, Synced, SyncRequest
from sapo_node.training.base import SampleRequest
from sapo_node.training.encoding import Encoder

STEP_SECONDS: Final = 300.0  # longest step of the engine (one token of each running completion)
SYNC_SECONDS: Final = 300.0  # longest exchange of weights
WATCH_SECONDS: Final = 0.5  # between two looks at whether the engine's processes live


class _Progress(StatLoggerBase):
    """Tells the heartbeat that the engine moves on; vLLM calls it at every step."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        pass

    def record(self, *args: Any, **kwargs: Any) -> None:
        workers.progress()

    def log_engine_initialized(self) -> None:
        pass


class NotLoaded(Exception):
    """New weights could not be loaded: the engine has old and new ones mixed."""


class InferenceWorker:
    """The handlers, and the engine they work on."""

    def __init__(self) -> None:
        self._llm: AsyncLLM | None = None
        self._encoder: Encoder
        self._settings: InferenceSection
        self._request: StartRequest
        self._number = 0
        self._sampling: set[asyncio.Future[Any]] = set()
        self._processes: list[BaseProcess] = []
        self._exchanging = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    async def start(self, request: StartRequest) -> Synced:
        """Start vLLM on a model folder and try it on the probe."""
        began = time.monotonic()
        self._settings = InferenceSection.model_validate(request.inference)
        self._request = request
        workers.stage("loading model", deadline=self._settings.start_seconds)
        tokenizer = AutoTokenizer.from_pretrained(request.folder, local_files_only=True, trust_remote_code=False)
        self._encoder = Encoder(tokenizer, request.stop_ids[0], self._settings.system_prompt)
        before = {process.pid for process in multiprocessing.active_children()}
        self._llm = AsyncLLM.from_engine_args(engine_args(request, self._settings), stat_loggers=[_Progress])
        self._processes = [process for process in multiprocessing.active_children() if process.pid not in before]
        self._watching = asyncio.create_task(self._watch(), name="watch")
        workers.stage("warming up", deadline=self._settings.start_seconds)
        await self._engine.update_weight_version(str(request.policy_version))
        difference = await self._difference(request.probe)
        workers.stage(base.READY)
        return Synced(difference=difference, stall_seconds=0.0, seconds=time.monotonic() - began)

    async def sample(self, request: SampleRequest) -> SampledBatch:
        """Completions of each question; a question whose prompt is too long gets none."""
        began, params = time.monotonic(), request.params
        prompts = [self._encoder.prompt(question) for question in request.questions]
        longest = min(self._settings.max_prompt_tokens, self._request.max_length - 1)
        task = asyncio.ensure_future(
            asyncio.gather(
                *(self._group(prompt, params, index) for index, prompt in enumerate(prompts) if len(prompt) <= longest)
            )
        )
        self._sampling.add(task)
        self._tell()
        try:
            drawn = iter(await task)
        finally:
            self._sampling.discard(task)
            self._tell()
        async with self._exchanging:
            pass  # whether weights that come in are right is known at its end; wrong ones end this process
        groups = [next(drawn) if len(prompt) <= longest else [] for prompt in prompts]
        versions = [version for group in groups for one in group for version in one.policy_versions]
        return SampledBatch(
            groups=groups,
            policy_version=min(versions, default=int(await self._engine.get_weight_version())),
            seconds=time.monotonic() - began,
        )

    async def sync(self, request: SyncRequest) -> Synced:
        """Exchange the weights in flight, then try the probe. A fault half-way leaves the engine unusable."""
        async with self._exchanging:
            began = time.monotonic()
            self._tell()
            await self._engine.pause_generation(mode="keep", clear_cache=True)
            if request.path is not None:
                problems = await self._engine.collective_rpc("sapo_reload", kwargs={"folder": request.path})
            else:
                problems = await self._engine.collective_rpc("sapo_receive", kwargs={"transfer": request.transfer})
            if any(problems):
                raise NotLoaded(" | ".join(filter(None, problems)))
            await self._engine.update_weight_version(str(request.policy_version))
            await self._engine.resume_generation()
            stall = time.monotonic() - began
            difference = await self._difference(request.probe)
        self._tell()
        return Synced(difference=difference, stall_seconds=stall, seconds=time.monotonic() - began)

    async def interrupt(self, request: Nothing) -> Nothing:
        """End the sampling that runs now; its calls fail."""
        for task in self._sampling:
            task.cancel()
        return Nothing()

    def _tell(self) -> None:
        """Name the stage. Nothing is due of an engine that waits, so then it has no deadline."""
        if self._exchanging.locked():
            workers.stage("loading new weights", deadline=SYNC_SECONDS)
        elif self._sampling:
            workers.stage("sampling", deadline=STEP_SECONDS)
        else:
            workers.stage(base.READY)

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise workers.Refused("no model is loaded yet")
        return self._llm

    async def _group(self, prompt: list[int], params: base.SamplingParams, index: int) -> list[Sampled]:
        """The completions of one prompt."""
        room = self._request.max_length - len(prompt)
        output = await self._generate(
            prompt,
            SamplingParams(
                n=params.n,
                max_tokens=min(params.max_tokens, room),
                temperature=params.temperature,
                seed=None if params.seed is None else params.seed + 65_537 * index,
                logprobs=0,
                stop_token_ids=self._request.stop_ids,
                ignore_eos=True,  # the trainer's stop tokens are the only ones
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        completions = sorted(output.outputs, key=lambda one: one.index)
        texts = self._encoder.decode([list(one.token_ids) for one in completions])
        return [_sampled(one, text) for one, text in zip(completions, texts, strict=True)]

    async def _difference(self, probe: Probe) -> float:
        """Mean absolute difference between the log-probs of the probe here and at the trainer."""
        output = await self._generate(
            probe.token_ids, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False)
        )
        assert output.prompt_logprobs is not None, "they were asked for"
        pairs = zip(output.prompt_logprobs[1:], probe.token_ids[1:], strict=True)  # the first token has none
        here = [entry[token].logprob for entry, token in pairs if entry is not None]
        return sum(abs(a - b) for a, b in zip(here, probe.logprobs, strict=True)) / len(here)

    async def _generate(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        self._number += 1
        final: RequestOutput | None = None
        try:
            async for output in self._engine.generate({"prompt_token_ids": prompt}, params, str(self._number)):
                final = output
        except EngineDeadError:
            await self._give_up()
        if final is None or not final.finished:
            raise RuntimeError("vLLM ended a request without its result")
        return final

    async def _watch(self) -> None:
        """End this process when one of the engine's has ended; the node starts another."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._engine.errored or any(not process.is_alive() for process in self._processes):
                await self._give_up()

    async def _give_up(self) -> None:
        for process in self._processes:
            process.join(timeout=1.0)
        codes = [process.exitcode for process in self._processes if process.exitcode]
        workers.give_up(f"vLLM's engine ended: {describe(codes[0] if codes else None)}")


def describe(code: int | None) -> str:
    """How a process of the engine ended, for people."""
    if code is None:
        return "it says why above"
    if code == -signal.SIGKILL:
        return "it was killed (SIGKILL), as the kernel does when memory runs out"
    return f"by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}; it says why above"


def engine_args(request: StartRequest, settings: InferenceSection) -> AsyncEngineArgs:
    """vLLM's settings for ours. The GPU's part has not run on a GPU yet."""
    from vllm.platforms import current_platform

    values: dict[str, Any] = {
        "model": request.folder,
        "skip_tokenizer_init": True,  # questions are encoded and completions decoded as the trainer does it
        "dtype": request.dtype,
        "generation_config": "vllm",  # none of the model's own penalties or cuts: they would bias the ratio
        "max_model_len": min(request.max_length, settings.max_prompt_tokens + settings.max_completion_tokens),
        "max_num_seqs": settings.batch_completions,
        "seed": request.seed if request.seed is not None else int.from_bytes(os.urandom(4), "big"),
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "sapo_node.inference.vllm_extension.WeightSync",
        "tensor_parallel_size": settings.tensor_parallel,
        "trust_remote_code": False,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
    }
    if current_platform.is_cpu():
        values |= {"enforce_eager": True, "kv_cache_memory_bytes": int(settings.kv_cache_gib * (1 << 30))}
    else:
        values |= {"gpu_memory_utilization": request.gpu_memory_share}
    return AsyncEngineArgs(**values)


def _sampled(one: CompletionOutput, text: str) -> Sampled:
    token_ids = list(one.token_ids)
    assert one.logprobs is not None, "they were asked for"
    return Sampled(
        text=text,
        finish="stop" if one.finish_reason == "stop" else "length",
        token_ids=token_ids,
        logprobs=[entry[token].logprob for entry, token in zip(one.logprobs, token_ids, strict=True) if entry],
        policy_versions=[int(span.version) for span in one.weight_versions or []],
    )


def main() -> None:
    """Serve until the node is gone."""
    worker = InferenceWorker()
    uvloop.run(
        workers.serve_async(
            {
                "start": worker.start,
                "sample": worker.sample,
                "sync": worker.sync,
                "interrupt": worker.interrupt,
            }
        )
    )


if __name__ == "__main__":
    main()
