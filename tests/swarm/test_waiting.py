"""What happens to received batches that nobody reads."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sapo_node.identity import Identity
from sapo_node.rollouts import codec
from sapo_node.rollouts.schema import Completion
from sapo_node.swarm import waiting
from sapo_node.swarm.waiting import MAX_WAITING, MAX_WAITING_BYTES, Waiting
from tests.swarm.test_exchange import SWARM, make_batch


@dataclass(eq=False)
class Sized:
    memory: int


def test_batches_leave_in_their_order() -> None:
    async def main() -> None:
        queue, batches = Waiting[Sized](), [Sized(1), Sized(1)]
        reading = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        assert [queue.put(batch) for batch in batches] == [[], []]
        assert [await reading, await queue.get()] == batches

    asyncio.run(main())


def test_beyond_the_number_the_oldest_goes() -> None:
    queue, batches = Waiting[Sized](), [Sized(1) for _ in range(MAX_WAITING + 1)]
    assert [queue.put(batch) for batch in batches] == [[]] * MAX_WAITING + [[batches[0]]]


def test_bloated_batches_push_out_each_other_and_no_usual_one() -> None:
    queue, usual = Waiting[Sized](), [Sized(500_000) for _ in range(30)]
    assert [queue.put(batch) for batch in usual] == [[]] * 30
    bloated = [Sized(MAX_WAITING_BYTES // 4 + n) for n in range(100)]
    dropped = [one for batch in bloated for one in queue.put(batch)]
    assert len(dropped) >= 97
    assert set(dropped) <= set(bloated)
    assert queue.put(Sized(2 * MAX_WAITING_BYTES))[0].memory == 2 * MAX_WAITING_BYTES, "what never fits"


def test_a_kilobyte_of_megabytes_is_counted_by_what_it_takes_here(tmp_path: Path) -> None:
    me = Identity.create(tmp_path / "me.key")
    batch = make_batch(me, 1, 1)
    texts = [Completion(text="\U0001f600" + "a" * 65_000, finish="stop", n_tokens=1) for _ in range(64)]
    group = msgspec.structs.replace(batch.groups[0], completions=texts)
    data = codec.encode_batch(msgspec.structs.replace(batch, groups=[group]), me).data
    assert len(data) < 4096
    assert codec.open_batch(data, SWARM).memory > 64 * 4 * 65_000
    assert waiting.MAX_WAITING_BYTES < 5 * 64 * 4 * 65_000, "so five of them do not wait"
