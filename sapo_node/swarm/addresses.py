"""What a multiaddr tells before it is dialled: whom it names, how far it leads, and whether to follow a stranger there.

Anybody can announce any address. A node that dialled them all would knock at doors inside its own machine and network
for strangers, so it follows them only where they may be themselves: out into the internet, into private networks if it
is in one, and on this machine if it is reached there alone. Addresses that the owner gave are not asked about.
"""

import ipaddress
import re
import socket
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from itertools import zip_longest
from typing import Final

_MULTIADDR = re.compile(r"/[!-~]+")
_IP = re.compile(r"/ip[46]/([^/]+)")
_PRIVATE: Final = tuple(
    map(ipaddress.ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"))
)
"""Networks of homes, companies and providers (RFC 1918, 6598, 4193); VPNs take from them too."""


class Reach(IntEnum):
    """How far an address leads; the smaller, the sooner it is worth a dial."""

    ANYWHERE = 0  # also every name: what it stands for is not known here
    PRIVATE = 1
    LOOPBACK = 2
    NOWHERE = 3  # one link, many hosts, no host


def is_multiaddr(text: str) -> bool:
    """Whether a text could be one, and is safe to show: visible ASCII that begins with a slash."""
    return _MULTIADDR.fullmatch(text) is not None


def peer_id_of(address: str) -> str:
    """The peer id at the end of a multiaddr; empty if it has none."""
    return address.rpartition("/p2p/")[2] if "/p2p/" in address else ""


def reach(address: str) -> Reach:
    """How far a multiaddr leads."""
    if not address.startswith("/ip"):
        return Reach.ANYWHERE if address.startswith("/dns") else Reach.NOWHERE
    found = _IP.match(address)
    try:
        ip = ipaddress.ip_address(found[1]) if found else None
    except ValueError:
        ip = None
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        ip = ip.ipv4_mapped
    if ip is None:
        return Reach.NOWHERE
    if ip.is_loopback:
        return Reach.LOOPBACK
    if any(ip in network for network in _PRIVATE if network.version == ip.version):
        return Reach.PRIVATE
    special = ip.is_link_local or ip.is_multicast or ip.is_reserved or ip.is_unspecified or str(ip).startswith("0.")
    return Reach.NOWHERE if special else Reach.ANYWHERE


def followed(own: Iterable[str]) -> frozenset[Reach]:
    """Where a node follows strangers that is reached by `own` addresses itself."""
    reaches = {reach(address) for address in own} - {Reach.NOWHERE}
    return frozenset({Reach.ANYWHERE, *(reaches if reaches == {Reach.LOOPBACK} else reaches & {Reach.PRIVATE})})


def listened(listen: Sequence[str], announced: bool) -> list[str]:
    """Addresses by which a node that listens on `listen` is reached from near, beyond those p2pd tells: where others
    are `announced` it tells those alone, and not which there are behind 0.0.0.0."""
    hidden = announced and any(address.startswith(("/ip4/0.0.0.0/", "/ip6/::/")) for address in listen)
    return [*listen, *(outward() if hidden else ())]


def in_turn(lists: Iterable[Collection[str]]) -> list[str]:
    """The first of each, then the second of each, and so on."""
    return [item for row in zip_longest(*lists) for item in row if item is not None]


def outward() -> list[str]:
    """The address by which this machine speaks to the internet, which tells whether it is in a private network. Asks
    the kernel's routes; nothing is sent. Empty where there is no way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a block for documentation
        except OSError:
            return []
        return [f"/ip4/{probe.getsockname()[0]}"]
