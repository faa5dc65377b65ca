"""The addresses by which a node may join, in the order in which they are tried, and how each was found.

First the owner's (`swarm.initial_peers`, then `swarm.peers_file`), then the public list that comes with the program,
then what /dnsaddr names among these stand for, then who was met at the rendezvous, and last, only while the node knows
nobody, the peers of earlier runs. The file is read and the names are looked up again and again, so a peer that comes
later, or elsewhere, is found.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from sapo_node.config import SwarmSection
from sapo_node.config_addresses import check_peer_address
from sapo_node.swarm import dnsaddr
from sapo_node.swarm.addresses import in_turn, peer_id_of, reach
from sapo_node.swarm.dnsaddr import Lookup, LookupFailed
from sapo_node.swarm.peers import Found, PeerBook

PUBLIC_FORMAT: Final = "Format 1."
MAX_LISTED: Final = 64
"""Addresses taken from the peers file, and from the public list for one swarm; each costs a dial every few minutes."""

MAX_FILE_BYTES: Final = 64 * 1024

MAX_CACHED: Final = 16
"""Peers of earlier runs that are tried, the most recently seen first. More would be a burst of dials."""

ADDRESSES_A_PEER: Final = 4
"""Of such a peer: which of its addresses leads to it from here is not known beforehand."""

FILE_SECONDS: Final = 3.0
DNS_SECONDS: Final = 300.0
DNS_RETRY_SECONDS: Final = 15.0
"""Between two readings of the file, and two lookups of a name: after an answer, and after none."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An address to join by, ending with /p2p/<peer id>, and where it came from."""

    address: str
    found: Found


class Candidates:
    """The addresses there are now. `run()` keeps them fresh; `tell` gets a sentence for people, once a change."""

    def __init__(
        self,
        settings: SwarmSection,
        book: PeerBook,
        tell: Callable[[str], None],
        lookup: Lookup = dnsaddr.lookup,
    ) -> None:
        self._settings = settings
        self._book = book
        self._tell = tell
        self._lookup = lookup
        # The list is for public swarms; those of a private one's name are others.
        listed = settings.public_peers and settings.secret_file is None
        self._public = public_peers(settings.name) if listed else []
        self._file: list[str] = []
        self._resolved: dict[str, list[str]] = {}
        self._told: dict[str, str] = {}
        self._met: list[str] = []

    def meet(self, addresses: list[str]) -> None:
        """Take note of the addresses that the rendezvous found last, each ending with /p2p/<peer id>."""
        self._met = addresses[:MAX_LISTED]

    @property
    def faults(self) -> list[str]:
        """Sentences on names and a file that give no addresses now."""
        return list(self._told.values())

    def current(self, lonely: bool) -> list[Candidate]:
        """What to try, in order; peers of earlier runs only while `lonely`."""
        listed = self._listed()
        cached = self._cached() if lonely else []
        found = [Candidate(address, way) for address, way in listed if not _is_name(address)]
        found += [Candidate(a, Found.DNS) for name, _ in listed for a in self._resolved.get(name, ())]
        found += [Candidate(a, Found.RENDEZVOUS) for a in self._met]
        found += [Candidate(a, Found.CACHED) for a in cached]
        first: dict[str, Candidate] = {}
        for candidate in found:
            if self._book.may(peer_id_of(candidate.address)):
                first.setdefault(candidate.address, candidate)
                self._told.pop(candidate.address, None)
            elif candidate.found in (Found.INITIAL, Found.FILE):
                self._tell_once(
                    candidate.address, f"{candidate.address} is not dialled: its peer is denied, or not allowed."
                )
        return list(first.values())

    def _cached(self) -> list[str]:
        """Addresses of peers of earlier runs; every peer's first one comes before any second, the nearest last."""
        return in_turn(
            [f"{address}/p2p/{record.peer_id}" for address in sorted(record.addresses, key=reach)[:ADDRESSES_A_PEER]]
            for record in self._book.best(time.time(), MAX_CACHED)
        )

    async def run(self) -> None:
        """Read the file and look up names until cancelled."""
        due: dict[str, float] = {}
        while True:
            self._read_file()
            names = [address for address, _ in self._listed() if _is_name(address)]
            now = time.monotonic()
            late = [name for name in names if due.get(name, 0.0) <= now]
            for name, well in zip(late, await asyncio.gather(*map(self._look_up, late)), strict=True):
                due[name] = time.monotonic() + (DNS_SECONDS if well else DNS_RETRY_SECONDS)
            self._forget(names, due)
            await asyncio.sleep(FILE_SECONDS)

    def _listed(self) -> list[tuple[str, Found]]:
        return [
            *((address, Found.INITIAL) for address in self._settings.initial_peers),
            *((address, Found.FILE) for address in self._file),
            *((address, Found.PUBLIC) for address in self._public),
        ]

    async def _look_up(self, name: str) -> bool:
        try:
            self._resolved[name] = await dnsaddr.resolve(name, self._lookup)
        except LookupFailed as failure:  # what it stood for before stays
            self._tell_once(name, f"{name} cannot be resolved ({failure}); it is tried again in a while.")
            return False
        self._told.pop(name, None)
        return True

    def _forget(self, names: Collection[str], due: dict[str, float]) -> None:
        """Drop names, and sentences on addresses, that the file no longer has."""
        for gone in due.keys() - set(names):
            del due[gone]
            self._resolved.pop(gone, None)
        for gone in self._told.keys() - {address for address, _ in self._listed()} - {str(self._settings.peers_file)}:
            del self._told[gone]

    def _read_file(self) -> None:
        path = self._settings.peers_file
        if path is None:
            return
        try:
            self._file, faults = parse_peers_file(path)
        except (OSError, ValueError) as error:  # what it said before stays
            reason = error.strerror if isinstance(error, OSError) else str(error)
            self._tell_once(str(path), f"swarm.peers_file: {path} cannot be read ({reason}); it is tried again.")
            return
        if faults:
            self._tell_once(str(path), f"swarm.peers_file: {path}: {'; '.join(faults)}")
        else:
            self._told.pop(str(path), None)

    def _tell_once(self, about: str, sentence: str) -> None:
        if self._told.get(about) != sentence:
            self._told[about] = sentence
            self._tell(sentence)


def parse_peers_file(path: Path) -> tuple[list[str], list[str]]:
    """Addresses in a file, one a line (# begins a comment line), and what is wrong with other lines, at most three.

    Raises OSError, or ValueError for a file that is too large or no text.
    """
    with open(path, "rb") as stream:
        data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES >> 10} KiB")
    addresses, faults = [], []
    for number, line in enumerate(data.decode("utf-8").splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            addresses.append(check_peer_address(text))
        except ValueError as error:
            faults.append(f"line {number} {error}")
    return addresses[:MAX_LISTED], faults[:3]


def public_peers(swarm: str, text: str | None = None) -> list[str]:
    """Addresses of the public list for one swarm. Raises ValueError for a list (`text` replaces it) that is broken."""
    if text is None:
        text = resources.files("sapo_node").joinpath("swarm", "public_peers.txt").read_text(encoding="utf-8")
    if not text.partition("\n")[0].endswith(PUBLIC_FORMAT):
        raise ValueError(f"the public list does not begin with a line that ends in {PUBLIC_FORMAT!r}")
    rows = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    wrong = next((row for row in rows if len(row) != 2), None)
    if wrong is not None:
        raise ValueError(f"a line of the public list holds a swarm and an address, not {' '.join(wrong)!r}")
    return [check_peer_address(address) for name, address in rows if name == swarm][:MAX_LISTED]


def _is_name(address: str) -> bool:
    return address.startswith("/dnsaddr/")
