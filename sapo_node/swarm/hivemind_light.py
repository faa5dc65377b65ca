"""The one module that imports hivemind, and only the parts of it that need no torch.

`import hivemind` loads torch, its optimisers and averagers: seconds and hundreds of megabytes for a node process that
never touches a tensor. Networking and Kademlia need none of it, but three submodules on the way do. So the package is
registered bare (its `__init__` is not run) and those three are stood in for while the rest is imported. What is left
behind is real: only the stand-ins go away again.

This depends on the inside of hivemind, hence on exactly `VERSION`. tests/swarm/test_dht.py imports this module in a
fresh interpreter and fails when a new version no longer fits.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Final

VERSION: Final = "1.1.12"

_STAND_INS: Final = {
    "hivemind.utils.mpfuture": "MPFuture",
    "hivemind.utils.tensor_descr": "TensorDescriptor",
    "hivemind.dht.dht": "DHT",
}
"""Submodules that import torch, and the one name that others import from each."""


def _check_version() -> None:
    try:
        found = importlib.metadata.version("hivemind")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"hivemind is not installed; run: pip install hivemind=={VERSION}") from None
    if found != VERSION:
        raise ImportError(
            f"hivemind {found} is installed, but sapo-node imports parts of exactly {VERSION}; "
            f"run: pip install hivemind=={VERSION}"
        )


@contextmanager
def _bare_hivemind() -> Iterator[None]:
    """Let `import hivemind.x` work without running hivemind's own `__init__`."""
    if "hivemind" in sys.modules:  # already imported, whole or bare: nothing to save
        yield
        return
    _check_version()
    found = importlib.util.find_spec("hivemind")
    if found is None or found.submodule_search_locations is None:
        raise ImportError(f"hivemind's files are missing; run: pip install --force-reinstall hivemind=={VERSION}")
    package = ModuleType("hivemind", "Bare package: see sapo_node.swarm.hivemind_light.")
    package.__spec__ = importlib.machinery.ModuleSpec("hivemind", None, is_package=True)
    package.__path__ = package.__spec__.submodule_search_locations = list(found.submodule_search_locations)
    sys.modules["hivemind"] = package
    for name, attribute in _STAND_INS.items():
        stand_in = ModuleType(name)
        setattr(stand_in, attribute, type(attribute, (), {"__doc__": "Stand-in; never used."}))
        sys.modules[name] = stand_in
    try:
        yield
    except BaseException:
        del sys.modules["hivemind"]  # half a package must not pass for a whole one at the next attempt
        raise
    finally:
        for name in _STAND_INS:
            del sys.modules[name]


with _bare_hivemind():
    from hivemind.dht.protocol import DHTProtocol
    from hivemind.dht.routing import DHTID, RoutingTable
    from hivemind.dht.traverse import traverse_dht
    from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
    from hivemind.proto import dht_pb2, p2pd_pb2
    from hivemind.utils.logging import use_hivemind_log_handler
    from hivemind.utils.multiaddr import Multiaddr
    from hivemind.utils.serializer import MSGPackSerializer

P2PD: Final = Path(sys.modules["hivemind"].__path__[0], "hivemind_cli", "p2pd")
"""The libp2p daemon that hivemind's wheel carries."""

# hivemind prints to stderr by itself; here its messages go where ours go. Below ERROR they are a line for each thing a
# stranger does wrong, so anyone could fill the log.
use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.ERROR)

__all__ = [
    "DHTID",
    "P2P",
    "P2PD",
    "VERSION",
    "DHTProtocol",
    "MSGPackSerializer",
    "Multiaddr",
    "P2PContext",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "RoutingTable",
    "dht_pb2",
    "p2pd_pb2",
    "traverse_dht",
]
