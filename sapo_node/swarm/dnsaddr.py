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
from typing import Final

from sapo_node.swarm.p2pd import encode_multiaddr

log = logging.getLogger(__name__)

LOOKUP_SECONDS: Final = 5.0
MAX_DEPTH: Final = 4
MAX_LOOKUPS: Final = 16
MAX_ADDRESSES: Final = 32
MAX_ADDRESS_CHARS: Final = 256
"""Bounds of one resolution: a record that names another, or a thousand, costs no more than this."""

_DIALLED = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/[^/]+/(?:tcp/\d+|udp/\d+/quic-v1)/p2p/[1-9A-HJ-NP-Za-km-z]{40,64}")

Lookup = Callable[[str], Awaitable[list[str]]]
"""Texts of the TXT records of a name. Raises `LookupFailed`."""


class LookupFailed(Exception):
    """The name could not be looked up; the text says which and why."""


async def lookup(name: str) -> list[str]:
    """Ask the system's name servers."""
    import dns.asyncresolver  # a fifth of a second; most nodes never need it

    return await ask(dns.asyncresolver.get_default_resolver(), name)


async def ask(resolver: "object", name: str) -> list[str]:
    """TXT records of a name by a `dns.asyncresolver.Resolver`."""
    import dns.asyncresolver
    import dns.exception

    assert isinstance(resolver, dns.asyncresolver.Resolver)
    try:
        answer = await resolver.resolve(name, "TXT", lifetime=LOOKUP_SECONDS, search=False)
    except (dns.exception.DNSException, OSError) as error:
        raise LookupFailed(f"{name}: {' '.join(str(error).split()) or type(error).__name__}") from error
    return [b"".join(record.strings).decode(errors="replace") for record in answer]


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
            texts = await lookup(f"_dnsaddr.{host}")
        except LookupFailed as failure:
            failures.append(str(failure))
            continue
        for entry in _entries(texts, suffix):
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


def _entries(texts: list[str], suffix: str) -> list[str]:
    """The usable multiaddrs among TXT records, bounded."""
    entries = []
    for text in texts[: 4 * MAX_ADDRESSES]:
        entry = text.removeprefix("dnsaddr=")
        if entry == text or len(entry) > MAX_ADDRESS_CHARS or not entry.endswith(suffix):
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
