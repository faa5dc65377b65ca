"""Peers from DNS: `/dnsaddr/<host>` stands for the multiaddrs in the TXT records of `_dnsaddr.<host>`.

libp2p's convention (multiformats/multiaddr, protocols/DNSADDR.md): each record reads `dnsaddr=<multiaddr>`, which may
again begin with /dnsaddr/. What stands behind the host in the address asked for must be the end of the answer, so
`/dnsaddr/example.org/p2p/<id>` takes this one peer only. It is resolved here and not by p2pd, which wants to know the
peer id before it asks, and whose answers nobody could bound.

Who answers for the host decides whom a node meets: as much trust as an address book, and no more.
"""

import logging
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from sapo_node.swarm.addresses import is_multiaddr
from sapo_node.swarm.p2pd import encode_multiaddr

if TYPE_CHECKING:
    import dns.asyncresolver

log = logging.getLogger(__name__)

LOOKUP_SECONDS: Final = 5.0
MAX_DEPTH: Final = 4
MAX_LOOKUPS: Final = 16
MAX_ADDRESSES: Final = 32
MAX_ADDRESS_CHARS: Final = 256
MAX_NUMERIC: Final = 4
"""Bounds of one resolution: a record that names another, or a thousand, costs no more than this."""

_NAMED = re.compile(r"/(dns|dns4|dns6)/([^/]+)(/.*)")
_DIALLED = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/[^/]+/(?:tcp/\d+|udp/\d+/quic-v1)/p2p/[1-9A-HJ-NP-Za-km-z]{40,64}")

Lookup = Callable[[str], Awaitable[list[str]]]
"""Texts of the TXT records of a name. Raises `LookupFailed`."""


class LookupFailed(Exception):
    """The name could not be looked up; the text says which and why."""


async def lookup(name: str) -> list[str]:
    """Ask the system's name servers."""
    return texts(await ask(None, name, "TXT"))


def texts(records: "list[Any]") -> list[str]:
    """What TXT records say."""
    return [b"".join(record.strings).decode(errors="replace") for record in records]


async def ask(resolver: "dns.asyncresolver.Resolver | None", name: str, kind: str) -> "list[Any]":
    """Records of a name; None asks the system's name servers, whichever they are now. Raises `LookupFailed`."""
    import dns.asyncresolver  # a fifth of a second; most nodes never need it
    import dns.exception

    try:
        resolver = resolver or dns.asyncresolver.Resolver()
        return list(await resolver.resolve(name, kind, lifetime=LOOKUP_SECONDS, search=False))
    except (dns.exception.DNSException, OSError, ValueError) as error:  # ValueError: nonsense in /etc/resolv.conf
        raise LookupFailed(f"{name}: {' '.join(str(error).split()) or type(error).__name__}") from error


async def numeric(address: str, resolver: "dns.asyncresolver.Resolver | None" = None) -> list[str]:
    """The addresses by number that a multiaddr by name stands for, at most MAX_NUMERIC, none if its name leads nowhere;
    one by number is returned as it is."""
    named = _NAMED.fullmatch(address)
    if named is None:
        return [address]
    way, host, rest = named.groups()
    found = []
    for kind, family in (("A", "ip4"), ("AAAA", "ip6")):
        if way in ("dns", f"dns{family[2:]}"):
            try:
                found += [f"/{family}/{record.address}{rest}" for record in await ask(resolver, host, kind)]
            except LookupFailed as failure:
                log.debug("left out: %s", failure)
    return found[:MAX_NUMERIC]


async def resolve(address: str, lookup: Lookup = lookup) -> list[str]:
    """The multiaddrs that a /dnsaddr address stands for, each ending with /p2p/<peer id>, in a form p2pd can dial.

    Raises `LookupFailed` if there is none; a part that fails beside others that do not is left out.
    """
    found: dict[str, None] = {}
    failures: list[str] = []
    todo = [(address, 0)]
    asked: set[tuple[str, str]] = set()
    while todo and len(asked) < MAX_LOOKUPS and len(found) < MAX_ADDRESSES:
        current, depth = todo.pop(0)
        host, suffix = _split(current)
        if (host, suffix) in asked:
            continue
        asked.add((host, suffix))
        try:
            said = await lookup(f"_dnsaddr.{host}")
        except LookupFailed as failure:
            failures.append(str(failure))
            continue
        for entry in _entries(said, suffix):
            if not entry.startswith("/dnsaddr/"):
                found[entry] = None
            elif depth + 1 < MAX_DEPTH:
                todo.append((entry, depth + 1))
    if not found:
        reason = failures[0] if failures else "its TXT records name no address of a peer that could be dialled"
        raise LookupFailed(reason)
    return list(found)[:MAX_ADDRESSES]


def _split(address: str) -> tuple[str, str]:
    """Host of a /dnsaddr address, and what stands behind it, with its slash."""
    host, slash, rest = address.removeprefix("/dnsaddr/").partition("/")
    return host.lower(), slash + rest


def _entries(given: list[str], suffix: str) -> list[str]:
    """The usable multiaddrs among TXT records, bounded."""
    entries = []
    for text in given[: 4 * MAX_ADDRESSES]:
        entry = text.removeprefix("dnsaddr=")
        if entry == text or len(entry) > MAX_ADDRESS_CHARS or not is_multiaddr(entry) or not entry.endswith(suffix):
            continue
        if entry.startswith("/dnsaddr/") or (_DIALLED.fullmatch(entry) and _encodes(entry)):
            entries.append(entry)
    return entries


def _encodes(address: str) -> bool:
    try:
        encode_multiaddr(address)
    except ValueError as error:
        log.debug("left out: %s", error)
        return False
    return True
