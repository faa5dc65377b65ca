"""Which network a peer is reached through: what counts as one source of groups, where identities cost nothing.

Thousands of keys fit onto one machine, and many addresses come with one contract. A /24 of IPv4 and a /48 of IPv6 are
about what one party gets without effort, so peers of one such network count as one. In private networks and on one
machine everybody has the same network; there each peer counts by itself. Who is reached through a relay has the relay's
network, told apart from that of peers who live there.

The addresses looked at are those of connections that exist, never what somebody says of himself.
"""

import ipaddress
import re
from functools import lru_cache
from typing import Final

from sapo_node.swarm.addresses import Reach, reach

RELAY: Final = "relay "
"""How the network of a relay begins, when a peer is reached through one."""

_IP = re.compile(r"/ip[46]/([^/]+)")
_PEER_ID = re.compile(r"/(?:p2p|ipfs)/([^/]+)")


@lru_cache(maxsize=4096)  # as many as peers.MAX_PEERS; asked for each offer at each fetch
def network_of(address: str) -> str:
    """The network that a connection's far end (a multiaddr) counts for; empty where each peer counts by itself."""
    relayed = address.partition("/p2p-circuit")
    if relayed[1]:
        relay_id = _PEER_ID.search(relayed[0])
        return RELAY + (_public_network(relayed[0]) or (relay_id[1] if relay_id else ""))
    return _public_network(address)


def _public_network(address: str) -> str:
    found = _IP.match(address)
    if found is None or reach(address) is not Reach.ANYWHERE:
        return ""
    ip = ipaddress.ip_address(found[1])
    if isinstance(ip, ipaddress.IPv6Address):  # IPv6 that whoever has one IPv4 address gets with it is that address
        ip = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else ip)
    return str(ipaddress.ip_network((ip, 24 if ip.version == 4 else 48), strict=False))
