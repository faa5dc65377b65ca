"""Where addresses to join by come from, and in which order."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sapo_node.config import SwarmSection
from sapo_node.swarm import candidates
from sapo_node.swarm.candidates import Candidates, parse_peers_file, public_peers
from sapo_node.swarm.dnsaddr import LookupFailed
from sapo_node.swarm.peers import Found, PeerBook


def peer(number: int) -> str:
    return f"/ip4/127.0.0.1/tcp/{number}/p2p/12D3KooW{'A' * 40}{chr(ord('a') + number)}bcd"


class Names:
    """A name service that knows what it was told."""

    def __init__(self, **known: list[str]) -> None:
        self.known = known

    async def __call__(self, name: str) -> list[str]:
        if name not in self.known:
            raise LookupFailed(f"{name}: no such name")
        return [f"dnsaddr={one}" for one in self.known[name]]


def make(
    book: PeerBook | None = None, names: Names | None = None, told: list[str] | None = None, **settings: Any
) -> Candidates:
    section = SwarmSection(public_peers=False, **settings)
    return Candidates(
        section, PeerBook() if book is None else book, (told if told is not None else []).append, names or Names()
    )


def running(made: Candidates, until: Callable[[], object], seconds: float = 5.0) -> None:
    """Let the candidates keep themselves fresh until something holds."""

    async def main() -> None:
        task = asyncio.create_task(made.run())
        try:
            async with asyncio.timeout(seconds):
                while not until():
                    await asyncio.sleep(0.01)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_the_order_is_initial_file_public_dns_rendezvous_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "public_peers", lambda swarm: [peer(3)])
    (tmp_path / "peers").write_text(f"# ours\n{peer(2)}\n")
    book = PeerBook()
    book.saw("12D3KooWcached", ["/ip4/127.0.0.1/tcp/9"], time.time())
    settings = SwarmSection(initial_peers=["/dnsaddr/host", peer(1)], peers_file=tmp_path / "peers")
    made = Candidates(settings, book, print, Names(**{"_dnsaddr.host": [peer(4)]}))
    made.meet([peer(5)])
    running(made, lambda: len(made.current(lonely=False)) == 5)
    assert [(c.address, c.found) for c in made.current(lonely=True)] == [
        (peer(1), Found.INITIAL),
        (peer(2), Found.FILE),
        (peer(3), Found.PUBLIC),
        (peer(4), Found.DNS),
        (peer(5), Found.RENDEZVOUS),
        ("/ip4/127.0.0.1/tcp/9/p2p/12D3KooWcached", Found.CACHED),
    ]


def test_peers_of_earlier_runs_are_for_lonely_nodes() -> None:
    book = PeerBook()
    book.saw("12D3KooWcached", ["/ip4/127.0.0.1/tcp/9"], time.time())
    assert make(book).current(lonely=False) == []


def test_an_address_is_tried_under_its_first_origin() -> None:
    made = make(initial_peers=[peer(1)])
    made.meet([peer(1)])
    assert [c.found for c in made.current(lonely=False)] == [Found.INITIAL]


def test_a_file_that_appears_later_is_read_and_its_absence_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "FILE_SECONDS", 0.02)
    told: list[str] = []
    made, began = make(told=told, peers_file=tmp_path / "peers"), time.monotonic()
    running(made, lambda: time.monotonic() - began > 0.2)
    assert len(told) == 1
    assert str(tmp_path / "peers") in told[0]
    (tmp_path / "peers").write_text(peer(1))
    running(made, lambda: made.current(lonely=False))
    (tmp_path / "peers").write_text(peer(2))
    running(made, lambda: made.current(lonely=False)[0].address == peer(2))


def test_a_name_that_fails_is_told_once_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "FILE_SECONDS", 0.02)
    monkeypatch.setattr(candidates, "DNS_RETRY_SECONDS", 0.02)
    told: list[str] = []
    names = Names()
    made, began = make(names=names, told=told, initial_peers=["/dnsaddr/host"]), time.monotonic()
    running(made, lambda: time.monotonic() - began > 0.2)
    assert len(told) == 1
    assert "/dnsaddr/host cannot be resolved" in told[0]
    assert made.faults == told
    names.known["_dnsaddr.host"] = [peer(1)]
    running(made, lambda: [c.found for c in made.current(lonely=False)] == [Found.DNS])
    assert made.faults == []


def test_what_was_said_of_an_address_goes_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "FILE_SECONDS", 0.02)
    file, book = tmp_path / "peers", PeerBook(deny=[peer(2).rpartition("/")[2]])
    file.write_text(f"{peer(1)}\n{peer(2)}\n")
    made = make(book, peers_file=file)
    running(made, lambda: made.current(lonely=False) and made.faults)
    assert "is not dialled" in made.faults[0]
    file.write_text(f"{peer(1)}\n")
    running(made, lambda: not made.faults)
    file.unlink()
    running(made, lambda: made.faults)
    assert "cannot be read" in made.faults[0]


def test_wrong_lines_of_a_file_are_named_and_the_others_used(tmp_path: Path) -> None:
    (tmp_path / "peers").write_text(f"\n# comment\n{peer(1)}\nnonsense\n/ip4/127.0.0.1/tcp/1\n")
    addresses, faults = parse_peers_file(tmp_path / "peers")
    assert addresses == [peer(1)]
    assert [fault.partition(" is ")[0].partition(" must ")[0] for fault in faults] == ["line 4", "line 5"]


def test_a_file_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "peers").write_bytes(b"#" * (candidates.MAX_FILE_BYTES + 1))
    with pytest.raises(ValueError, match="larger than"):
        parse_peers_file(tmp_path / "peers")
    (tmp_path / "peers").write_text(f"{peer(1)}\n" * 500)
    assert len(parse_peers_file(tmp_path / "peers")[0]) == candidates.MAX_LISTED


HEADER = "# A list. Format 1.\n"


def test_the_public_list_is_by_swarm() -> None:
    text = f"{HEADER}one {peer(1)}\ntwo {peer(2)}\none /dnsaddr/example.org\n"
    assert public_peers("one", text) == [peer(1), "/dnsaddr/example.org"]


@pytest.mark.parametrize("text", ["one x\n", f"{HEADER}{peer(1)}\n", f"{HEADER}one nonsense\n"])
def test_a_broken_public_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"list|multiaddr"):
        public_peers("one", text)


def test_the_list_that_comes_with_the_program_can_be_read() -> None:
    assert public_peers("sapo") == []  # until somebody runs one


def test_the_outside_address_of_an_earlier_peer_is_among_those_tried() -> None:
    book = PeerBook()
    inside = [f"/ip4/10.0.{i}.1/tcp/9" for i in range(5)]
    book.saw("12D3KooWmet", [*inside, "/ip4/8.8.8.8/tcp/9"], time.time())
    assert make(book).current(lonely=True)[0].address == "/ip4/8.8.8.8/tcp/9/p2p/12D3KooWmet"


def test_a_peer_of_earlier_runs_is_tried_by_several_addresses_loopback_last() -> None:
    book = PeerBook()
    book.saw("12D3KooWmet", ["/ip4/127.0.0.1/tcp/9", "/ip4/192.0.2.7/tcp/9"], time.time())
    assert [c.address for c in make(book).current(lonely=True)] == [
        "/ip4/192.0.2.7/tcp/9/p2p/12D3KooWmet",
        "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWmet",
    ]


def test_the_public_list_is_not_for_a_private_swarm_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "public_peers", lambda _: [peer(1)])
    found = [
        [c.address for c in Candidates(SwarmSection(secret_file=file), PeerBook(), print).current(lonely=True)]
        for file in (None, Path("swarm.key"))
    ]
    assert found == [[peer(1)], []]
