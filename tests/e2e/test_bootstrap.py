"""`sapo-node bootstrap` as its owner runs it: nodes meet by it, go on without it, and find it again."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sapo_node.swarm.peers import load_peers
from tests.harness import Node, Swarm, alive, descendants, free_port, sapo_node, swarm, wait_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class BootstrapNode(Node):
    """A bootstrap peer that writes its addresses into a file beside its data."""

    @property
    def file(self) -> Path:
        return self.directory / "peers.txt"

    def start(self, *arguments: str) -> "BootstrapNode":
        command = [sys.executable, "-m", "sapo_node", "bootstrap", "--config", str(self.config_path)]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--addresses", str(self.file), *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        return self

    def wait_serving(self) -> "BootstrapNode":
        self.wait(lambda: bool((s := self.status) and s.state == "serving" and s.addresses), "to serve", 30)
        return self


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Swarm]:
    with swarm(tmp_path) as made:
        yield made


def named(nodes: Swarm, name: str, **over: Any) -> BootstrapNode:
    """A bootstrap peer, not started."""
    plain = nodes.node(name, **over)
    made = BootstrapNode(name, plain.directory, plain.config)
    nodes.nodes.append(made)
    return made


def bootstrap(nodes: Swarm) -> BootstrapNode:
    return named(nodes, "bootstrap", swarm={"listen": [f"/ip4/127.0.0.1/tcp/{free_port()}"]})


def found(node: Node) -> dict[str, int]:
    return node.status.found if node.status else {}


def remembered(node: Node) -> int:
    """Peers that it wrote down with an address; who dialled it is known by name alone at first."""
    file = node.data / "peers.json"
    return sum(bool(record.addresses) for record in load_peers(file)[0]) if file.exists() else 0


def wait_for_the_other(node: Node) -> None:
    node.wait(lambda: bool(node.rounds) and node.rounds[-1].peers == 1, "the other trainer", 90)
    node.wait(lambda: found(node).get("peers file") == 1, "to write down how it joined", 10)


def wait_to_go_on_without_it(node: Node) -> None:
    since = node.rounds[-1].round
    node.wait(lambda: "peers file" not in found(node), "to notice that the bootstrap peer is gone", 10)
    node.wait(lambda: node.rounds[-1].round > since + 10 and node.rounds[-1].external_groups > 0, "shared rounds", 40)


def test_nodes_meet_by_a_bootstrap_peer_outlive_it_and_find_it_again(nodes: Swarm) -> None:
    served = bootstrap(nodes)
    trainers = [nodes.node(name, swarm={"peers_file": str(served.file)}).start() for name in ("a", "b")]
    served.start().wait_serving()
    for node in trainers:
        wait_for_the_other(node)
    served.wait(lambda: found(served) == {"it dialled us": 2}, "two nodes that joined by it", 10)
    assert (served.status and served.status.role) == "bootstrap"
    served.wait(lambda: remembered(served) == 2, "to know where those two can be dialled", 30)

    assert served.stop(10) == 0
    assert (served.status and served.status.state) == "stopped"
    for node in trainers:
        wait_to_go_on_without_it(node)

    served.start().wait_serving()
    served.wait(lambda: sum(found(served).values()) == 2, "both nodes, found by those it met before", 20)
    assert "met before" in found(served)
    for node in trainers:
        assert node.stop() == 0
    assert served.stop(10) == 0


def test_it_says_how_it_is_and_where_and_holds_its_directory(nodes: Swarm) -> None:
    served = bootstrap(nodes).start().wait_serving()
    (address,) = served.status.addresses  # type: ignore[union-attr]
    assert served.file.read_text() == f"{address}\n"
    assert address in served.log
    told = sapo_node("status", "--data-dir", served.data)
    assert told.returncode == 0
    assert "serving" in told.stdout
    assert "nobody" in sapo_node("peers", "--data-dir", served.data).stdout
    second = sapo_node("bootstrap", "--config", served.config_path)
    assert second.returncode == 4
    assert "in use by another node" in second.stderr


def test_a_bootstrap_peer_whose_p2pd_dies_is_there_again(nodes: Swarm) -> None:
    served = bootstrap(nodes).start().wait_serving()
    address, p2pd = served.address(), descendants(served.process.pid)  # type: ignore[union-attr]
    for pid in p2pd:
        os.kill(pid, signal.SIGKILL)
    assert wait_gone(p2pd) == set()
    served.wait(lambda: bool(alive(descendants(served.process.pid))), "another p2pd", 20)  # type: ignore[union-attr]
    guest = named(nodes, "guest", swarm={"initial_peers": [address]})
    guest.start().wait(lambda: found(guest) == {"initial peer": 1}, "to join by it", 20)
    assert guest.stop(10) == 0
    assert [record.found for record in load_peers(guest.data / "peers.json")[0]] == ["initial peer"]
    assert served.stop(10) == 0


def test_a_port_that_is_taken_ends_it_with_the_reason(nodes: Swarm) -> None:
    served = bootstrap(nodes).start().wait_serving()
    other = nodes.node("other", swarm=served.config["swarm"])
    told = sapo_node("bootstrap", "--config", other.config_path)
    assert told.returncode == 1
    assert "in use by another program" in told.stderr
    assert other.status is not None
    assert other.status.state == "stopped"


def test_two_that_know_no_address_meet_at_the_rendezvous(nodes: Swarm) -> None:
    # In the place of the public DHT: a host of another swarm, whose p2pd serves libp2p's DHT just as IPFS nodes do.
    host = named(nodes, "host", swarm={"name": "elsewhere"}).start().wait_serving()
    entrance = {"rendezvous": True, "rendezvous_peers": [host.address()]}
    guests = [named(nodes, name, swarm=entrance).start() for name in ("a", "b")]
    a, b = guests
    a.wait(lambda: sum(found(a).values()) == sum(found(b).values()) == 1, "each other", 90)
    assert all("published in the public IPFS DHT" in guest.log for guest in guests)
    assert {way for guest in guests for way in found(guest)} >= {"rendezvous"}
    assert found(host) == {}
    for node in (*guests, host):
        assert node.stop(10) == 0
