"""Network addresses in settings: what a multiaddr must look like, and which ones carry a peer id."""

import ipaddress
import re
from typing import Annotated

import base58
from pydantic import AfterValidator, Field


def _multiaddr(address: str) -> str:
    found = re.fullmatch(r"/(ip4|ip6|dns|dns4|dns6|dnsaddr)/([!-.0-~]+)(/[!-.0-~]+)*", address)  # visible ASCII
    if found is None:
        raise ValueError("is no multiaddr; one looks like /ip4/203.0.113.7/tcp/4001")
    if found[1] in ("ip4", "ip6"):
        try:
            ipaddress.ip_address(found[2])
        except ValueError:
            raise ValueError(f"{found[2]} is no IP address") from None
    if any(int(port) > 65535 for port in re.findall(r"/(?:tcp|udp)/([0-9]{1,9})", address)):
        raise ValueError("a port is at most 65535")
    return address


def _without_peer_id(address: str) -> str:
    if "/p2p/" in address:
        raise ValueError("is this node's own; its /p2p/ part follows from its key, so leave it out")
    return address


def _with_peer_id(address: str) -> str:
    if re.fullmatch(r"/dnsaddr/[^/]+", address):  # its DNS records name the peers
        return address
    peer_id = re.search(r"/p2p/([^/]+)$", address)
    if peer_id is None:
        raise ValueError("must end with /p2p/ and the peer id; the other node prints its full addresses when it starts")
    if not is_peer_id(peer_id[1]):
        shown = peer_id[1] if len(peer_id[1]) <= 80 else f"{peer_id[1][:80]}..."
        raise ValueError(f"has the peer id {shown} at its end, which is not valid; copy the whole address again")
    return address


def is_peer_id(text: str) -> bool:
    """Whether it is base58 of a multihash: an Ed25519 key in the clear, or a SHA-256."""
    if not (text.isascii() and text.isalnum()):  # white space at the end would be overlooked below
        return False
    try:
        data = base58.b58decode(text[:64])  # valid ones are shorter; decoding takes the square of the length
    except ValueError:
        return False
    return data[:2] in (b"\x00\x24", b"\x12\x20") and len(data) == 2 + data[1]


def _peer_id(text: str) -> str:
    if not is_peer_id(text):
        raise ValueError("is no peer id; `sapo-node peers` lists those of the peers met, as in 12D3KooW...")
    return text


def check_peer_address(address: str) -> str:
    """The address, if one could join by it. Raises ValueError with what is wrong."""
    return _with_peer_id(_multiaddr(address))


Multiaddr = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_multiaddr)]
OwnAddress = Annotated[Multiaddr, AfterValidator(_without_peer_id)]
PeerAddress = Annotated[Multiaddr, AfterValidator(_with_peer_id)]
PeerId = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_peer_id)]

IPFS_PEERS = (
    "/dnsaddr/bootstrap.libp2p.io/p2p/QmNnooDu7bfjPFoTZYxMNLWUQJyrVwtbZg5gBMjTezGAJN",
    "/dnsaddr/bootstrap.libp2p.io/p2p/QmQCU2EcMqAqQPR2i9bChDtGNJchTbq5TbXJJ16u19uLTa",
    "/dnsaddr/bootstrap.libp2p.io/p2p/QmbLHAnMoJPWSCR5Zhtx6BHJX9KiKNN6tpvbUcqanj75Nb",
    "/dnsaddr/bootstrap.libp2p.io/p2p/QmcZf59bWwK5XFi76CZX8cbJ4BhTzzA3gU1ZjYZcYW3dwt",
)
"""The long-known entrances to the public DHT of IPFS, from its documentation."""
