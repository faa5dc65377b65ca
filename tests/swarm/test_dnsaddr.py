"""Peers from DNS: what the records give, how little a bad one can cost, and a name server on loopback."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import dns.asyncresolver
import dns.message
import dns.rdatatype
import dns.resolver
import dns.rrset
import pytest

from sapo_node.swarm import dnsaddr
from sapo_node.swarm.dnsaddr import LookupFailed, resolve

A, B = (f"12D3KooW{'A' * 43}{end}" for end in "ab")


def peer(number: int, peer_id: str = A) -> str:
    return f"/ip4/127.0.0.1/tcp/{number}/p2p/{peer_id}"


class Zone:
    """TXT records by name, and who asked how often."""

    def __init__(self, **records: list[str]) -> None:
        self.records = records
        self.asked: list[str] = []

    async def __call__(self, name: str) -> list[str]:
        self.asked.append(name)
        host = name.removeprefix("_dnsaddr.")
        if host not in self.records:
            raise LookupFailed(f"{name}: no such name")
        return self.records[host]


def resolved(zone: Zone, address: str) -> list[str]:
    return asyncio.run(resolve(address, zone))


def test_a_name_stands_for_the_addresses_in_its_records() -> None:
    zone = Zone(host=[f"dnsaddr={peer(1)}", f"dnsaddr={peer(2, B)}"])
    assert resolved(zone, "/dnsaddr/host") == [peer(1), peer(2, B)]
    assert zone.asked == ["_dnsaddr.host"]


def test_a_peer_id_behind_the_name_takes_that_peer_only() -> None:
    zone = Zone(host=[f"dnsaddr={peer(1)}", f"dnsaddr={peer(2, B)}"])
    assert resolved(zone, f"/dnsaddr/host/p2p/{B}") == [peer(2, B)]


def test_names_lead_to_names() -> None:
    zone = Zone(host=["dnsaddr=/dnsaddr/other"], other=[f"dnsaddr={peer(1)}"])
    assert resolved(zone, "/dnsaddr/host") == [peer(1)]


def test_a_circle_ends() -> None:
    zone = Zone(host=["dnsaddr=/dnsaddr/other"], other=["dnsaddr=/dnsaddr/host"])
    with pytest.raises(LookupFailed, match="no address of a peer"):
        resolved(zone, "/dnsaddr/host")
    assert len(zone.asked) == 2


def test_depth_is_bounded() -> None:
    zone = Zone(**{f"h{i}": [f"dnsaddr=/dnsaddr/h{i + 1}"] for i in range(50)})
    with pytest.raises(LookupFailed):
        resolved(zone, "/dnsaddr/h0")
    assert len(zone.asked) == dnsaddr.MAX_DEPTH


def test_lookups_and_addresses_are_bounded() -> None:
    wide = Zone(host=[f"dnsaddr=/dnsaddr/h{i}" for i in range(100)])
    with pytest.raises(LookupFailed):
        resolved(wide, "/dnsaddr/host")
    assert len(wide.asked) == dnsaddr.MAX_LOOKUPS
    many = Zone(host=[f"dnsaddr={peer(i)}" for i in range(1, 1000)])
    assert len(resolved(many, "/dnsaddr/host")) == dnsaddr.MAX_ADDRESSES


@pytest.mark.parametrize(
    "text",
    [
        "v=spf1 -all",
        peer(1),
        "dnsaddr=",
        "dnsaddr=/ip4/127.0.0.1/tcp/1",
        f"dnsaddr=/ip4/999.0.0.1/tcp/1/p2p/{A}",
        f"dnsaddr=/ip4/127.0.0.1/tcp/443/wss/p2p/{A}",
        f"dnsaddr={peer(1)}/p2p-circuit",
        f"dnsaddr=/dns4/{'x' * 300}/tcp/1/p2p/{A}",
    ],
)
def test_records_that_name_no_peer_are_left_out(text: str) -> None:
    assert resolved(Zone(host=[text, f"dnsaddr={peer(7)}"]), "/dnsaddr/host") == [peer(7)]


def test_a_part_that_fails_does_not_hide_the_rest() -> None:
    zone = Zone(host=["dnsaddr=/dnsaddr/gone", f"dnsaddr={peer(1)}"])
    assert resolved(zone, "/dnsaddr/host") == [peer(1)]


def test_a_name_that_is_not_there_is_told() -> None:
    with pytest.raises(LookupFailed, match=r"_dnsaddr\.gone: no such name"):
        resolved(Zone(), "/dnsaddr/gone")


# A real name server


HOST = {"A": "127.0.0.2", "AAAA": "::2"}


class Server(asyncio.DatagramProtocol):
    """Answers TXT questions about one name from memory; says nothing about `silent`."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        (question,) = query.question
        if "silent" in question.name.to_text():
            return
        answer = dns.message.make_response(query)
        if question.name.to_text() == "_dnsaddr.peers.test.":
            answer.answer.append(dns.rrset.from_text(question.name, 60, "IN", "TXT", *(f'"{t}"' for t in self.texts)))
        kind = dns.rdatatype.to_text(question.rdtype)
        if question.name.to_text() == "host.test." and kind in HOST:
            answer.answer.append(dns.rrset.from_text(question.name, 60, "IN", kind, HOST[kind]))
        self.transport.sendto(answer.to_wire(), addr)


def against(texts: list[str], body: Callable[[dnsaddr.Lookup, int], Awaitable[None]]) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: Server(texts), local_addr=("127.0.0.1", 0))
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], transport.get_extra_info("sockname")[1]

        async def lookup(name: str) -> list[str]:
            return dnsaddr.texts(await dnsaddr.ask(resolver, name, "TXT"))

        try:
            await body(lookup, resolver.port)
        finally:
            transport.close()

    asyncio.run(main())


def test_records_come_from_a_name_server() -> None:
    async def body(lookup: dnsaddr.Lookup, _: int) -> None:
        # a server may give its records in any order
        assert sorted(await resolve("/dnsaddr/peers.test", lookup)) == [peer(1), peer(2, B)]

    against([f"dnsaddr={peer(1)}", "something else", f"dnsaddr={peer(2, B)}"], body)


def test_a_name_without_records_is_told() -> None:
    async def body(lookup: dnsaddr.Lookup, _: int) -> None:
        with pytest.raises(LookupFailed, match=r"_dnsaddr\.other\.test"):
            await resolve("/dnsaddr/other.test", lookup)

    against([], body)


def test_a_name_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dnsaddr, "LOOKUP_SECONDS", 0.3)

    async def body(lookup: dnsaddr.Lookup, _: int) -> None:
        with pytest.raises(LookupFailed, match=r"_dnsaddr\.silent\.test"):
            await resolve("/dnsaddr/silent.test", lookup)

    against([], body)


def configured(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Make `file` the system's resolv.conf."""
    read = dns.resolver.BaseResolver.read_resolv_conf
    monkeypatch.setattr(dns.resolver.BaseResolver, "read_resolv_conf", lambda self, _: read(self, str(file)))


@pytest.mark.parametrize("text", [None, "", "nameserver nonsense\n", b"\xff\xfe"])
def test_a_system_without_name_servers_is_a_failed_lookup(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | bytes | None
) -> None:
    file = tmp_path / "resolv.conf"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    configured(monkeypatch, file)
    monkeypatch.setattr(dnsaddr, "LOOKUP_SECONDS", 0.3)
    with pytest.raises(LookupFailed, match=r"_dnsaddr\.a\.test"):
        asyncio.run(resolve("/dnsaddr/a.test"))


def test_name_servers_that_are_named_later_are_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    configured(monkeypatch, file)

    async def body(_: dnsaddr.Lookup, port: int) -> None:
        with pytest.raises(LookupFailed):
            await resolve("/dnsaddr/peers.test")
        file.write_text("nameserver 127.0.0.1\n")
        monkeypatch.setattr(dns.resolver.BaseResolver, "port", property(lambda _: port, lambda *_: None), raising=False)
        assert await resolve("/dnsaddr/peers.test") == [peer(1)]

    against([f"dnsaddr={peer(1)}"], body)


def test_a_name_is_dialled_by_number() -> None:
    found: list[list[str]] = []

    async def body(_: dnsaddr.Lookup, port: int) -> None:
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers, resolver.port = ["127.0.0.1"], port
        for address in ("/dns/host.test/tcp/1", "/dns4/host.test/tcp/1", "/dns6/host.test/tcp/1", "/ip4/8.8.8.8/tcp/1"):
            found.append(await dnsaddr.numeric(address, resolver))

    against([], body)
    four, six = "/ip4/127.0.0.2/tcp/1", "/ip6/::2/tcp/1"
    assert found == [[four, six], [four], [six], ["/ip4/8.8.8.8/tcp/1"]]
