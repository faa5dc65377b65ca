"""How long from `publish` to usable, and how many bytes: N nodes in one process, each with its own p2pd, on loopback.

    python scripts/bench/exchange.py --nodes 4 --rounds 5 --push on
    python scripts/bench/exchange.py --nodes 4 --rounds 5 --push off
    python scripts/bench/exchange.py --nodes 16 --rounds 5 --push off --want 8

In each round every node publishes one batch, at a random moment of the interval, and then wants up to `--want` groups
(0: everything). "Usable" is the moment in which the subscriber holds the decoded batch; verification comes on top.
Envelope bytes are those of batches alone. Loopback bytes are the growth of the interface's counter, so they include
the DHT, gossip and other programs: run it on an idle machine.
"""

import asyncio
import json
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import uvloop

from sapo_node.config import SwarmSection
from sapo_node.identity import Identity
from sapo_node.rollouts.schema import Batch, Completion, Group, ModelCard, TaskRef
from sapo_node.swarm import protocol
from sapo_node.swarm.dht import SwarmDHT
from sapo_node.swarm.exchange import Exchange
from sapo_node.swarm.p2p import Network

SWARM = "bench"
EVERYTHING = 1_000_000
LOOPBACK = "/ip4/127.0.0.1/tcp/"


class BenchNode:
    """One node: publishes on demand and notes when it receives what."""

    def __init__(self, identity: Identity, network: Network, dht: SwarmDHT, push: str) -> None:
        self.identity = identity
        self.wanted = 0
        self.seq = 0
        self.arrivals: dict[bytes, float] = {}
        settings = SwarmSection(name=SWARM, push=push)  # type: ignore[arg-type]
        self.exchange = Exchange(
            network, dht, identity, SWARM, settings, max_age_seconds=300.0, seq_start=0, want=lambda: self.wanted
        )

    async def receive(self) -> None:
        async for received in self.exchange.subscribe():
            self.arrivals[received.opened.content_id] = time.monotonic()
            self.wanted -= len(received.opened.batch.groups)

    async def publish(self, groups: int, completions: int, characters: int) -> tuple[bytes, float]:
        self.seq += 1
        batch = make_batch(self.identity, self.seq, groups, completions, characters)
        started = time.monotonic()
        return await self.exchange.publish(batch), started


def make_batch(identity: Identity, seq: int, groups: int, completions: int, characters: int) -> Batch:
    """A batch of random text, which compresses like hexadecimal digits: to about half."""
    epoch = protocol.epoch_of(time.time())

    def group(index: int) -> Group:
        ref = TaskRef(
            source="reasoning_gym", version="0", name="t", config_hash=bytes(32), config={}, epoch=epoch, index=index
        )
        texts = [random.randbytes(characters // 2).hex() for _ in range(completions)]
        answers = [Completion(text=text, finish="stop", n_tokens=len(text)) for text in texts]
        return Group(task=ref, question_sha256=bytes(32), completions=answers, sampled_at=time.time(), policy_version=0)

    return Batch(
        proto=protocol.PROTO,
        swarm=SWARM,
        peer_id=identity.peer_id,
        seq=seq,
        created_at=time.time(),
        model=ModelCard(name="bench", params=0, licence="none", tokenizer_sha256=bytes(32)),
        groups=[group(i) for i in range(groups)],
    )


async def start_nodes(count: int, push: str, folder: Path, stack: AsyncExitStack) -> list[BenchNode]:
    """A swarm in which everyone knows the first node's address."""
    nodes: list[BenchNode] = []
    initial: list[str] = []
    for index in range(count):
        home = folder / str(index)
        home.mkdir()
        identity = Identity.create(home / "identity.key")
        network = await Network.start(identity, work_dir=home, listen=[LOOPBACK + "0"])
        stack.push_async_callback(network.close)
        dht = await SwarmDHT.start(network, SWARM, initial_peers=initial)
        stack.push_async_callback(dht.close)
        if not initial:
            (address, *_) = [a for a in await network.addresses() if a.startswith(LOOPBACK)]
            initial = [f"{address}/p2p/{network.peer_id}"]
        nodes.append(BenchNode(identity, network, dht, push))
    return nodes


async def run_round(nodes: list[BenchNode], options: dict[str, Any]) -> dict[bytes, float]:
    """Everyone publishes once within the interval; returns content id -> time of publication."""
    for node in nodes:
        node.wanted = options["want"] or EVERYTHING

    async def one(node: BenchNode) -> tuple[bytes, float]:
        await asyncio.sleep(random.uniform(0.0, options["interval"]))
        return await node.publish(options["groups"], options["completions"], options["characters"])

    async with asyncio.TaskGroup() as tasks:
        publications = [tasks.create_task(one(node)) for node in nodes]
        await asyncio.sleep(options["interval"])
    return dict(task.result() for task in publications)


def loopback_bytes() -> int:
    """Bytes received on the loopback interface since the machine started."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise click.ClickException("/proc/net/dev has no loopback interface")


async def bench(options: dict[str, Any]) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sapo-bench-")))
        nodes = await start_nodes(options["nodes"], options["push"], folder, stack)
        loops = [asyncio.create_task(work) for node in nodes for work in (node.exchange.run(), node.receive())]
        await asyncio.sleep(3.0)  # gossip forms its mesh at its heartbeat, once a second
        published: dict[bytes, float] = {}
        before = loopback_bytes()
        for _ in range(options["rounds"]):
            published |= await run_round(nodes, options)
        expected = len(published) * (len(nodes) - 1)
        for _ in range(150):  # the last ones may still be on their way
            if options["want"] or sum(len(n.arrivals) for n in nodes) >= expected:
                break
            await asyncio.sleep(0.1)
        on_wire = loopback_bytes() - before
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        return summary(nodes, published, on_wire, options)


def summary(
    nodes: list[BenchNode], published: dict[bytes, float], on_wire: int, options: dict[str, Any]
) -> dict[str, Any]:
    """What is printed: latencies in seconds, bytes a node and round."""
    latencies = sorted(at - published[content_id] for n in nodes for content_id, at in n.arrivals.items())
    node_rounds = len(nodes) * options["rounds"]
    stats = [n.exchange.stats for n in nodes]
    cuts = statistics.quantiles(latencies, n=20) if len(latencies) > 1 else [float("nan")] * 19
    return {
        "nodes": len(nodes),
        "push": options["push"],
        "rounds": options["rounds"],
        "envelope_bytes": sum(s.bytes_out for s in stats) // max(1, sum(s.batches_out for s in stats)),
        "received": len(latencies),
        "possible": len(published) * (len(nodes) - 1),
        "p50_seconds": round(cuts[9], 3),
        "p95_seconds": round(cuts[18], 3),
        "envelope_bytes_in_a_node_and_round": sum(s.bytes_in for s in stats) // node_rounds,
        "loopback_bytes_a_node_and_round": on_wire // node_rounds,
        "fetch_failures": sum(s.fetch_failures for s in stats),
        "store_failures": sum(s.store_failures for s in stats),
    }


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--nodes", type=click.IntRange(2, 64), default=4)
@click.option("--rounds", type=click.IntRange(1), default=5)
@click.option("--push", type=click.Choice(["auto", "on", "off"]), default="on")
@click.option("--interval", type=float, default=6.0, help="Seconds a round.")
@click.option("--groups", type=click.IntRange(1, 32), default=8, help="Groups a batch.")
@click.option("--completions", type=click.IntRange(2, 64), default=8, help="Completions a group.")
@click.option("--characters", type=click.IntRange(2, 65536), default=1000, help="Characters a completion.")
@click.option("--want", type=click.IntRange(0), default=0, help="Groups a node wants a round; 0: everything.")
def main(**options: Any) -> None:
    click.echo(json.dumps(uvloop.run(bench(options))))


if __name__ == "__main__":
    main()
