"""An inference worker without vLLM, for faults that vLLM does not have at will: files in the folder TOY_FAULTS switch
them on. `python -m tests.inference.toy_engine start ...` is the program with this worker in vLLM's place."""

import asyncio
import os
import sys
from pathlib import Path

import uvloop

from sapo_node import workers
from sapo_node.inference import vllm
from sapo_node.inference.base import Nothing, Sampled, SampledBatch, StartRequest, Synced, SyncRequest
from sapo_node.training.base import SampleRequest

FAULTS = "TOY_FAULTS"


def faulty(name: str) -> bool:
    return (Path(os.environ[FAULTS]) / name).exists()


class ToyEngine:
    async def start(self, request: StartRequest) -> Synced:
        self.version, self.stop = request.policy_version, request.stop_ids[0]
        return Synced(difference=0.0, stall_seconds=0.0, seconds=0.0)

    async def sample(self, request: SampleRequest) -> SampledBatch:
        await asyncio.sleep(0.1)
        if faulty("dies at sampling"):
            os._exit(9)
        one = Sampled(
            text="1",
            finish="stop",
            token_ids=[5, self.stop],
            logprobs=[-1.0, -1.0],
            policy_versions=[self.version],
        )
        groups = [[one] * request.params.n for _ in request.questions]
        return SampledBatch(groups=groups, policy_version=self.version, seconds=0.1)

    async def sync(self, request: SyncRequest) -> Synced:
        while faulty("hangs in exchanges"):
            await asyncio.sleep(0.1)
        self.version = request.policy_version
        return Synced(difference=0.0, stall_seconds=0.0, seconds=0.0)

    async def interrupt(self, request: Nothing) -> Nothing:
        return Nothing()


def main() -> None:
    toy = ToyEngine()
    handlers = [toy.start, toy.sample, toy.sync, toy.interrupt]
    uvloop.run(workers.serve_async({handler.__name__: handler for handler in handlers}))


if __name__ == "__main__":
    from sapo_node.cli import main as program

    vllm.VLLMEngine.__init__.__defaults__ = (None, "tests.inference.toy_engine")
    sys.exit(program())
