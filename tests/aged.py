"""Peers that a node has known for a day."""

from sapo_node.swarm.peers import AGED_HOURS, AGED_SECONDS, PeerBook


def work_a_day(book: PeerBook, peer_id: str, until: float) -> None:
    """Let a peer have worked for a day, until then. Of several peers of one book, too, whose days are the same: their
    groups would have to be accepted in the order of time."""
    book.accepted(peer_id, groups=1, usable=1, now=until)
    record = book.get(peer_id)
    assert record is not None
    record.first_accepted, record.hours = until - AGED_SECONDS, AGED_HOURS
