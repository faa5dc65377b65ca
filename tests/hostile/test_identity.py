"""Attacks on who said what."""

import random
import time
from pathlib import Path

import msgspec
import pytest

from sapo_node.config import NodeConfig
from sapo_node.identity import Identity, verify
from sapo_node.rollouts import codec
from sapo_node.rollouts.arrivals import Arrivals
from sapo_node.rollouts.codec import HEADER_BYTES, Rejected
from sapo_node.rollouts.verify import Reason
from sapo_node.swarm.catalogue import Catalogue
from sapo_node.swarm.exchange import Received
from sapo_node.swarm.peers import PeerBook
from sapo_node.swarm.protocol import MAX_INDEX
from sapo_node.tasks import mixture
from sapo_node.tasks.base import is_eval_question
from tests.hostile.test_hints import announcement
from tests.rollouts.test_codec import SWARM, batch
from tests.rollouts.test_verify import Node, envelope, group_of, spec_of, task_ref


def test_a_forged_envelope_with_anothers_key_in_its_head(tmp_path: Path) -> None:
    """Hope: the head names the victim's key, the signature is the attacker's, and nobody compares them."""
    victim, attacker = (Identity.create(tmp_path / name) for name in ("victim", "attacker"))
    sealed = codec.encode_batch(batch(attacker), attacker).data
    forged = sealed[:6] + victim.public_key + sealed[38:]
    with pytest.raises(Rejected, match="signature"):
        codec.open_batch(forged, SWARM)


def test_a_signature_moved_from_one_message_to_another(tmp_path: Path) -> None:
    """Hope: a signature of the victim's fits whatever stands behind it."""
    victim = Identity.create(tmp_path / "victim")
    first, second = (codec.encode_batch(batch(victim, seq=n), victim).data for n in (1, 2))
    with pytest.raises(Rejected, match="signature"):
        codec.open_batch(first[:HEADER_BYTES] + second[HEADER_BYTES:], SWARM)


def test_a_key_without_an_owner_speaks_for_nobody_else(tmp_path: Path) -> None:
    """Hope: a key of small order, for which everybody can sign, also passes under the victim's name."""
    nobody = bytes([1]) + bytes(31)
    victim = Identity.create(tmp_path / "victim")
    assert verify(nobody, b"anything", nobody + bytes(32)), "such keys exist; whoever uses one shares it with all"
    assert not verify(victim.public_key, b"anything", nobody + bytes(32))
    sealed = codec.encode_batch(batch(victim), victim).data
    with pytest.raises(Rejected, match="peer id is not that of the key"):
        codec.open_batch(sealed[:6] + nobody + nobody + bytes(32) + sealed[HEADER_BYTES:], SWARM)


def test_groups_signed_again_by_another_ask_other_questions(node: Node) -> None:
    """Hope: copy the work of an honest node, sign it with a key of one's own, and take the credit."""
    copyist = Identity.create(node.folder / "copyist.key")
    verified = node.verify(*(node.group(skip=n) for n in range(3)), sender=copyist)
    assert verified.reasons == [Reason.OTHER_QUESTION] * 3
    assert verified.groups == []


def test_a_copy_passes_where_a_task_has_few_questions(node: Node) -> None:
    """Hope: with 42 questions in all, an index is soon found at which the copyist is asked what the victim was.

    It passes, and SECURITY.md says so: the text and its reward are right, only their author is another.
    """
    few = {"min_base": 2, "max_base": 3, "min_value": 0, "max_value": 20}
    copyist = Identity.create(node.folder / "copyist.key")
    victim, node.sender = node.sender, copyist
    asked = {}
    for index in range(64):
        task = task_ref(name="base_conversion", config=few, index=index)
        asked[node.runner.run(node.scorers.question(spec_of(task), node.seed(task))).sha256] = task
    node.sender = victim
    for index in range(MAX_INDEX):
        task = task_ref(name="base_conversion", config=few, index=index)
        question = node.runner.run(node.scorers.question(spec_of(task), node.seed(task)))
        if question.sha256 in asked and not is_eval_question(question.sha256):
            break
    copied = group_of(asked[question.sha256], question.sha256, "101", "whatever the victim wrote")
    assert node.verify(copied, sender=copyist).reasons == [Reason.ACCEPTED]


def test_a_replayed_batch_counts_once(node: Node) -> None:
    """Hope: an honest batch, sent again by whoever captured it, is trained on twice or raises a score twice."""
    book = PeerBook()
    arrivals = Arrivals(
        NodeConfig(), node.me, mixture.load(node.tasks), node.scorers, node.pool, book, clock=lambda: 1_770_000_040.0
    )
    arrivals._verifier._swarm = "test"
    received = Received(envelope(node.sender, node.group()), 1000, node.sender.peer_id, "dht", 0.0)
    for _ in range(3):
        node.runner.run(arrivals.take(received))
    assert arrivals.counts["accept"] == 1
    record = book.get(node.sender.peer_id)
    assert record is not None
    assert record.accepted == 1
    assert node.runner.run(node.pool.stats()).external == 1


def test_two_nodes_with_one_key_confuse_only_themselves(node: Node, tmp_path: Path) -> None:
    """Hope: two machines speak as one peer, so that what one is blamed for protects the other, or a table breaks."""
    twin = Identity.load(node.sender.path)
    now = time.time()
    catalogue = Catalogue(node.me.peer_id, 300.0, lambda *_: True, random.Random(1))
    for seq, who in ((10, node.sender), (11, twin), (12, node.sender)):
        assert catalogue.add(who.peer_id, who.public_key, announcement(who, seq, now), "dht", now)
    assert not catalogue.add(twin.peer_id, twin.public_key, announcement(twin, 11, now), "dht", now), "the newest wins"
    assert catalogue.peers(now) == [node.sender.peer_id], "one peer, one place, one share"
    group = node.group()
    first, second = node.verify(group), node.verify(group, sender=twin)
    assert first.producer == second.producer
    for verified in (first, second):
        node.runner.run(node.pool.add_external(verified.producer, verified.content_id, verified.groups, now))
    assert node.runner.run(node.pool.stats()).external == 1, "the same coordinates are the same group"


def test_a_peer_id_swapped_for_the_victims(node: Node) -> None:
    """Hope: blame for what is wrong in the batch, or credit, falls on the peer it names."""
    attacker = Identity.create(node.folder / "attacker.key")
    named = msgspec.structs.replace(envelope(node.sender, node.group()).batch)
    with pytest.raises(Rejected, match="peer id is not that of the key"):
        codec.encode_batch(named, attacker)
    raw = codec.zstandard.compress(msgspec.msgpack.encode(named))
    with pytest.raises(Rejected, match="peer id is not that of the key"):
        codec.open_batch(codec._seal(b"B", raw, "test", attacker).data, "test")
