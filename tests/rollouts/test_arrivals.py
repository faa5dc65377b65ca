"""What a node takes from its swarm: how much of it and of whom, under which licences, and how it rids itself of it."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sapo_node.config import NodeConfig
from sapo_node.identity import Identity
from sapo_node.monitor.watch import Watch
from sapo_node.rollouts.arrivals import STOCK_ROUNDS, Arrivals
from sapo_node.rollouts.codec import Opened
from sapo_node.rollouts.pool import NewGroup, Pool
from sapo_node.rollouts.schema import Batch, Completion, Group, ModelCard, TaskRef
from sapo_node.rollouts.verify import Reason, Verified
from sapo_node.swarm.exchange import Received
from sapo_node.swarm.peers import AGED_SECONDS, PeerBook
from sapo_node.swarm.protocol import epoch_of
from sapo_node.tasks import mixture
from sapo_node.training.base import TrainCompletion
from tests.aged import work_a_day

NOW = time.time()
PAPER = {"training": {"recipe": "paper"}}
CAPPED = {"training": {"rule": "capped", "external_groups": 4}}


def task(index: int) -> TaskRef:
    return TaskRef(
        source="reasoning_gym",
        version="1",
        name="gcd",
        config_hash=bytes(32),
        config={},
        epoch=epoch_of(NOW),
        index=index,
    )


def usable(index: int) -> NewGroup:
    """A verified group with an advantage."""
    return NewGroup(
        task=task(index),
        question=f"question {index}",
        question_sha256=index.to_bytes(32, "big"),
        completions=[TrainCompletion(text=str(i), finish="stop") for i in range(2)],
        rewards=[1.0, 0.0],
        sampled_at=NOW,
        policy_version=0,
        first_drawn=False,
    )


def received(producer: str, licence: str = "apache-2.0", groups: int = 2) -> Received:
    answers = [Completion(text="1", finish="stop", n_tokens=1)] * 2
    batch = Batch(
        proto=1,
        swarm="test",
        peer_id=producer,
        seq=1,
        created_at=NOW,
        model=ModelCard(name="tiny", params=1, licence=licence, tokenizer_sha256=bytes(32)),
        groups=[
            Group(task=task(i), question_sha256=bytes(32), completions=answers, sampled_at=NOW, policy_version=0)
            for i in range(groups)
        ],
    )
    content_id = f"{producer} {licence}".encode().ljust(32)
    return Received(Opened(bytes(32), content_id, batch), 1000, producer, "dht", 0.1)


class ToyVerifier:
    """Accepts everything; `meanwhile` is called first."""

    def __init__(self) -> None:
        self.meanwhile: Any = lambda: None
        self.asked = 0

    async def verify(self, opened: Opened, now: float) -> Verified:
        self.meanwhile()
        self.asked += 1
        groups = [usable(100 * self.asked + i) for i in range(len(opened.batch.groups))]
        reasons = [Reason.ACCEPTED] * len(groups)
        return Verified(producer=opened.batch.peer_id, content_id=opened.content_id, reasons=reasons, groups=groups)


class Node:
    """The receiving side with a real pool and book."""

    def __init__(self, runner: asyncio.Runner, folder: Path, settings: dict[str, Any]) -> None:
        config = NodeConfig.model_validate(settings)
        self.runner, self.book = runner, PeerBook()
        self.pool = runner.run(Pool.open(folder / "pool.sqlite", config.rollouts))
        identity, tasks = Identity.create(folder / "key"), mixture.load(config.tasks)
        self.watch = Watch()
        self.arrivals = Arrivals(config, identity, tasks, None, self.pool, self.book, lambda: NOW, self.watch)  # type: ignore[arg-type]
        self.verifier = ToyVerifier()
        self.arrivals._verifier = self.verifier  # type: ignore[assignment]

    def stock(self, producer: str, groups: int, start: int) -> None:
        new = [usable(start + i) for i in range(groups)]
        self.runner.run(self.pool.add_external(producer, f"{producer}{start}".encode().ljust(32), new, NOW))

    def look(self) -> int:
        self.runner.run(self.arrivals.count_stock())
        return self.arrivals.want()

    def producers(self) -> list[str]:
        return sorted({c.producer for c in self.runner.run(self.pool.external_candidates(NOW))})

    def take(self, *batches: Received) -> None:
        for batch in batches:
            self.runner.run(self.arrivals.take(batch))

    def age(self, *peer_ids: str) -> None:
        for peer_id in peer_ids:
            work_a_day(self.book, peer_id, NOW)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    with asyncio.Runner() as runner:
        nodes: list[Node] = []

        def build(**settings: Any) -> Node:
            nodes.append(Node(runner, tmp_path, settings))
            return nodes[-1]

        yield build
        for node in nodes:
            runner.run(node.pool.close())


def test_groups_of_a_task_with_an_alarm_are_no_stock(make: Any) -> None:
    node = make(training={"external_groups": 4})
    node.stock("peer", 5, 0)
    assert node.look() == STOCK_ROUNDS * 4 - 5
    node.watch.bars = lambda task, **_: task == "gcd"
    assert node.look() == STOCK_ROUNDS * 4


def test_the_alarms_see_what_is_accepted(make: Any) -> None:
    node, seen = make(), []
    node.watch.external = lambda groups, sender: seen.extend(groups)
    node.take(received("peer", groups=3))
    assert len(seen) == 3


def test_keys_behind_one_relay_have_one_voice_in_alarms(make: Any) -> None:
    """Hope: three free keys behind the one relay that is in use are three shares, and so three networks."""
    node, heard = make(), []
    node.watch.external = lambda groups, sender: heard.append(sender)
    for number in range(3):
        node.book.saw(f"key{number}", (), NOW)
        node.book.came_from(f"key{number}", "/ip4/8.8.8.8/tcp/1/p2p/12D3KooWRelay/p2p-circuit")
        node.take(received(f"key{number}"))
    assert [sender.share for sender in heard] == ["key0", "key1", "key2"]
    assert len({sender.network for sender in heard}) == 1


def test_half_of_the_stock_is_kept_for_aged_peers_while_there_are_any(make: Any) -> None:
    node = make(**CAPPED)
    known = ["old", "older", "oldest", "eldest"]
    node.age(*known)
    target = STOCK_ROUNDS * 4
    for number in range(4):
        node.stock(f"sybil{number}", target // 4, 100 * number)
    assert node.look() == target // 2
    assert node.book.wanted("old", NOW)
    assert not node.book.wanted("another sybil", NOW)
    for number, name in enumerate(known):
        node.stock(name, target // 8, 1000 + 100 * number)
    assert node.look() == 0
    assert not node.book.wanted("old", NOW)


def test_without_aged_peers_newcomers_fill_the_stock(make: Any) -> None:
    node = make(**CAPPED)
    for number in range(4):
        assert node.book.wanted("another", NOW)
        node.stock(f"new{number}", STOCK_ROUNDS, 100 * number)
        assert node.look() == STOCK_ROUNDS * (3 - number)


def test_one_source_must_not_fill_the_stock(make: Any) -> None:
    """Hope: one batch fills what is kept for newcomers, no other newcomer is fetched, and the cap of the batch's sender
    doubles for want of others."""
    node = make(**CAPPED)
    node.age("old")
    target = STOCK_ROUNDS * 4
    node.stock("loud", target, 0)
    assert node.look() == target - target // 8
    assert not node.book.wanted("loud", NOW)
    assert node.book.wanted("quiet", NOW)


def test_a_crowd_on_one_network_is_one_source_of_the_stock(make: Any) -> None:
    """Hope: what one key may not fill, many keys of one host do."""
    node = make(**CAPPED)
    for number in range(8):
        name = f"key{number}"
        node.book.saw(name, (), NOW)
        node.book.came_from(name, "/ip4/8.8.8.8/tcp/1")
        node.stock(name, STOCK_ROUNDS, 100 * number)
    assert node.look() == 3 * STOCK_ROUNDS
    assert not node.book.wanted("key0", NOW)
    assert node.book.wanted("quiet", NOW)


def test_groups_without_signal_hide_nobody_and_earn_nothing(make: Any) -> None:
    """Hope: the newest 1024 groups are mine and teach nothing, so the sampler sees no others and the node stays hungry;
    what is accepted raises my score."""
    node = make(**PAPER)
    node.take(received("honest", groups=5))
    plain = node.verifier.verify

    async def verify(opened: Opened, now: float) -> Verified:
        found = await plain(opened, now)
        return replace(found, groups=[replace(group, rewards=[0.0, 0.0]) for group in found.groups])

    node.verifier.verify = verify
    for number in range(40):
        node.take(received("evil", f"batch {number}", groups=32))
    assert node.producers() == ["honest"]
    assert node.look() == STOCK_ROUNDS * 4 - 5
    assert node.book.score("evil", NOW) == 0.0
    assert node.book.score("honest", NOW) == 5.0


def test_the_exchange_is_told_which_batches_were_of_use(make: Any) -> None:
    node = make(swarm={"accept_licences": ["apache-2.0"]})
    told = []

    class ToyExchange:
        async def subscribe(self) -> AsyncGenerator[Received, None]:
            for one in [received("a"), received("a"), received("b", licence="other"), received("b")]:
                yield one
            raise EOFError

        def judged(self, batch: Received, *, useful: bool) -> None:
            told.append((batch.peer_id, useful))

    with pytest.raises(ExceptionGroup):
        node.runner.run(node.arrivals.consume(ToyExchange()))
    assert told == [("a", True), ("b", False), ("b", True)], "a duplicate says nothing of its sender"


def test_an_aged_peer_that_is_gone_holds_nothing_back(make: Any) -> None:
    node = make(**CAPPED)
    gone = NOW - 2 * AGED_SECONDS
    node.book.saw("old", (), gone - AGED_SECONDS)
    work_a_day(node.book, "old", gone)
    node.stock("new", STOCK_ROUNDS, 0)
    assert node.look() == STOCK_ROUNDS * 3


def test_the_papers_rule_fetches_from_everybody_alike(make: Any) -> None:
    node = make(**PAPER)
    node.age("old")
    node.stock("new", 20, 0)
    assert node.look() == STOCK_ROUNDS * 4 - 20
    assert node.book.wanted("new", NOW)


def test_groups_under_licences_that_are_not_accepted_are_left_out_without_blame(make: Any) -> None:
    node = make(swarm={"accept_licences": ["Apache-2.0"]})
    node.take(received("a", "cc-by-nc-4.0"), received("b", "APACHE-2.0 "))
    assert node.producers() == ["b"]
    assert node.arrivals.reasons[Reason.LICENCE] == node.arrivals.counts["ignore"] == 2
    assert node.book.score("a", NOW) == 0.0
    assert node.book.get("a").reasons["ignored: licence not accepted"].count == 2
    assert node.verifier.asked == 1, "what is left out costs no scorer"
    node.take(received("a", "cc-by-nc-4.0"))
    assert node.arrivals.reasons[Reason.LICENCE] == 2, "it is known, and not looked at again"


def test_without_a_list_every_licence_is_taken(make: Any) -> None:
    node = make()
    node.take(received("a", "unknown"))
    assert node.producers() == ["a"]


def test_what_is_being_verified_when_its_sender_is_denied_goes_nowhere(make: Any) -> None:
    node = make()

    def deny() -> None:
        node.book.denied = frozenset({"a"})

    node.verifier.meanwhile = deny
    node.take(received("a"))
    assert node.producers() == []


def test_what_ends_by_time_ends_while_no_round_does(make: Any) -> None:
    """Hope: while a node waits for groups, an alarm that I raised about a task never ends, and what I sent stays."""
    node = make()
    now, looked = [NOW], []
    node.arrivals._clock, node.watch.look_again = lambda: now[0], lambda: looked.append(now[0])
    node.stock("peer", 3, 0)
    node.runner.run(node.arrivals.expire())
    assert looked == [], "it is too early"
    now[0] += 1000.0
    for _ in range(10):
        node.runner.run(node.arrivals.expire())
    assert len(looked) == 1
    assert node.runner.run(node.pool.stats()).external == 0
    now[0] -= 5000.0
    node.runner.run(node.arrivals.expire())
    assert len(looked) == 2, "nor does a clock that was set back hold it up"


def test_a_purge_removes_a_peers_groups_and_no_others(make: Any) -> None:
    node = make()
    node.stock("bad", 3, 0)
    node.stock("good", 3, 100)
    node.book.purge_until = {"bad": NOW}
    node.runner.run(node.arrivals.purge())
    assert node.producers() == ["good"]


def test_a_purge_spares_what_comes_after_it(make: Any) -> None:
    node = make()
    node.stock("forgiven", 3, 0)
    node.book.purge_until = {"forgiven": NOW - 1}
    node.runner.run(node.arrivals.purge())
    assert node.producers() == ["forgiven"]


def test_the_book_knows_why(make: Any) -> None:
    node = make()
    node.take(received("a"), received("a"))
    record = node.book.get("a")
    assert {reason: tally.count for reason, tally in record.reasons.items()} == {
        "accepted": 2,
        "usable": 2,
        "ignored: duplicate": 2,
    }
