"""A bound on hivemind's routing table: beside each full bucket it keeps every other node that ever called."""

from typing import Any


def trim(table: Any, node_id: Any) -> None:
    """Keep as many replacements beside the bucket of `node_id` as a bucket has nodes, the newest ones, and forget what
    was asked of nodes that are not in it any more. To be called whenever a node was added.

    Ids are free: without a bound 10 new ones a second, each seen once, would take 400 MB in a day, and each look at the
    table as long as it is.
    """
    bucket = table.buckets[table.get_bucket_index(node_id)]
    while len(bucket.replacement_nodes) > bucket.size:
        del table[next(iter(bucket.replacement_nodes))]
    bucket.nodes_requested_for_ping.intersection_update(bucket.nodes_to_peer_id)
