"""A process that owns a trainer and a vLLM engine, as a node does, until it is killed: `lonely_node.py DATA_DIR`."""

import asyncio
import sys
from pathlib import Path

import uvloop

from sapo_node.inference.paired import PairedPolicy
from tests.inference.support import QUESTIONS, SHORT, settings


async def live(data: Path) -> None:
    policy = PairedPolicy(settings(data, inference={"engine": "vllm"}), None)
    await policy.start()
    await policy.sample(QUESTIONS, SHORT)
    print("up", flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    uvloop.run(live(Path(sys.argv[1])))
