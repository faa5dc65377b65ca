"""A batch as others receive it: signed, encoded and opened again, without a network between."""

from sapo_node.identity import Identity
from sapo_node.rollouts.codec import Opened, encode_batch, open_batch
from sapo_node.rollouts.schema import Batch, Group, ModelCard
from sapo_node.swarm.protocol import PROTO

CARD = ModelCard(name="bench", params=0, licence="apache-2.0", tokenizer_sha256=bytes(32))


def signed(identity: Identity, swarm: str, groups: list[Group], seq: int, now: float) -> Opened:
    """Groups of one peer as its batch number `seq`; `now` in seconds since 1970."""
    batch = Batch(
        proto=PROTO, swarm=swarm, peer_id=identity.peer_id, seq=seq, created_at=now, model=CARD, groups=groups
    )
    return open_batch(encode_batch(batch, identity).data, swarm)
