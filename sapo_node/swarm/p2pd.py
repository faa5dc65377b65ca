"""The p2pd process and its language: start it, learn that it ended, talk to its control socket.

p2pd is started here rather than by hivemind: it gets a memory limit, dies with the node, keeps its sockets in a private
folder, and its last words are kept for the error message. The control socket carries protobuf messages behind a varint
length; the readers here are bounded.
"""

import asyncio
import errno
import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import base58

from sapo_node import scratch
from sapo_node.errors import SapoError
from sapo_node.swarm.hivemind_light import P2PD, Multiaddr, P2PDaemonError, p2pd_pb2

START_SECONDS: Final = 15.0
STOP_SECONDS: Final = 3.0
MAX_CONTROL_BYTES: Final = 4 * 1024 * 1024
_LAST_WORDS_BYTES: Final = 2048
_LONGEST_SOCKET_FOLDER: Final = 80  # a Unix socket's path has at most 107 bytes (103 on macOS), its name included
_P2P_COMPONENT: Final = b"\xa5\x03"  # multiaddr code 421 as a varint


class NetworkError(Exception):
    """The network did not do what was asked. The message names the call and, where known, the cure."""


class PortInUse(NetworkError):
    """Another program listens on this port. p2pd itself would silently share it and lose half of its connections."""


class Daemon:
    """A p2pd child process. `await Daemon.start(...)` returns once it answers; `stop()` in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.control_path = folder / "p2pd.sock"
        self.pid = 0
        self._words = bytearray()
        self._child: asyncio.subprocess.Process
        self._reading: asyncio.Task[None]

    @classmethod
    async def start(cls, work_dir: Path, flags: Sequence[str], cores: int = 0) -> "Daemon":
        """Start p2pd with its sockets below `work_dir`, to run on at most so many cores at a time (0: all). Raises
        `NetworkError` with p2pd's own words."""
        self = cls(private_folder(work_dir))
        environment = os.environ | {"GOMEMLIMIT": "48MiB", "GOGC": "50", "GOLOG_LOG_LEVEL": "error"}
        environment |= {"GOMAXPROCS": str(cores)} if cores else {}
        try:
            self._child = await asyncio.create_subprocess_exec(
                *await _death_signal_prefix(),
                str(P2PD),
                f"-listen=/unix{self.control_path}",
                *flags,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the node's whole group; the network is needed while it drains
            )
        except OSError as error:
            raise NetworkError(f"cannot start {P2PD}: {error}; reinstall hivemind for this platform") from error
        self.pid = self._child.pid
        ready = asyncio.Event()
        self._reading = asyncio.create_task(self._read_output(ready))
        try:
            async with asyncio.timeout(START_SECONDS):
                await ready.wait()
        except TimeoutError:
            await self.stop()
            raise NetworkError(f"p2pd was not ready after {START_SECONDS:g} s: {self.last_words()}") from None
        except asyncio.CancelledError:
            await self.stop()
            raise
        if self._child.returncode is not None or self._reading.done():
            await self.stop()
            raise NetworkError(f"p2pd ended at its start: {self.last_words()}")
        return self

    async def _read_output(self, ready: asyncio.Event) -> None:
        """Read p2pd's output as long as it lives (a full pipe would stop it) and keep the end of it."""
        assert self._child.stdout is not None
        try:
            while words := await self._child.stdout.read(4096):
                self._words += words
                if not ready.is_set() and b"Peer ID:" in self._words:
                    self._words.clear()  # its greeting would be noise in an error message
                    ready.set()
                del self._words[:-_LAST_WORDS_BYTES]
        finally:
            ready.set()

    def last_words(self) -> str:
        """The end of what p2pd printed."""
        return "; ".join(self._words.decode(errors="replace").split("\n")).strip("; ") or "(it said nothing)"

    async def ended(self) -> str:
        """Wait for the end of the process; return what happened, for people."""
        status = await self._child.wait()
        await asyncio.wait({self._reading}, timeout=0.5)
        return f"p2pd ended with status {status}: {self.last_words()}"

    async def stop(self) -> None:
        """End the process, by force if it does not listen, and remove its sockets."""
        for signal in (self._child.terminate, self._child.kill):  # a stopped process takes only the second
            with suppress(ProcessLookupError):
                signal()
            try:
                await asyncio.wait_for(self._child.wait(), STOP_SECONDS)
                break
            except TimeoutError:
                continue
        await asyncio.wait({self._reading}, timeout=STOP_SECONDS)
        self._reading.cancel()
        shutil.rmtree(self.folder, ignore_errors=True)  # best effort: the next start clears it too


def private_folder(work_dir: Path) -> Path:
    """An empty folder, ours alone, for Unix sockets: below `work_dir`, or where that path is too long for a socket,
    below the temporary folder under a name that follows from it. What a killed node left there is removed."""
    folder = work_dir.absolute() / "sockets"
    if len(os.fsencode(folder)) > _LONGEST_SOCKET_FOLDER:
        name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
        folder = Path(tempfile.gettempdir(), f"p2pd-{os.geteuid()}-{name}")
    try:
        work_dir.mkdir(parents=True, exist_ok=True)
        scratch.private(folder)
        for old in folder.glob("*.sock"):
            old.unlink()
    except SapoError as error:
        raise NetworkError(f"{error}: p2pd's sockets must be ours") from error
    except OSError as error:
        raise NetworkError(f"{folder}: cannot make a folder for p2pd's sockets: {error.strerror}") from error
    return folder


async def exchange(control_path: Path, request: Any) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
    """Send one `p2pd_pb2.Request` and read its response. The connection stays open: a stream may begin there.

    Raises `P2PDaemonError` with p2pd's words if it refuses, `OSError` or `EOFError` if it is gone.
    """
    reader, writer = await asyncio.open_unix_connection(str(control_path))
    try:
        data: bytes = request.SerializeToString()
        writer.write(_varint(len(data)) + data)
        await writer.drain()
        response = p2pd_pb2.Response.FromString(await read_message(reader, MAX_CONTROL_BYTES))
        if response.type == p2pd_pb2.Response.ERROR:
            raise P2PDaemonError(response.error.msg)
    except BaseException:
        writer.close()
        raise
    return response, reader, writer


async def read_message(reader: asyncio.StreamReader, limit: int) -> bytes:
    """One message as p2pd frames it: its length as a varint, then its bytes."""
    size = shift = 0
    while True:
        byte = (await reader.readexactly(1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if size > limit or shift > 35:
            raise ConnectionError(f"p2pd sent a message over {limit} bytes")
        if byte < 0x80:
            return await reader.readexactly(size)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def peer_bytes(peer_id: str) -> bytes:
    """The binary form of a peer id."""
    try:
        return base58.b58decode(peer_id)
    except ValueError:
        raise ValueError(f"{peer_id!r} is not a peer id") from None


def encode_multiaddr(address: str) -> bytes:
    """The binary form of a multiaddr. Its /p2p/ parts are written here: hivemind gets Ed25519 ids wrong."""
    head, *parts = address.split("/p2p/")
    try:
        out = Multiaddr(head).to_bytes() if head else b""
        for part in parts:
            peer_id, slash, rest = part.partition("/")
            raw = peer_bytes(peer_id)
            out += _P2P_COMPONENT + _varint(len(raw)) + raw
            out += Multiaddr(slash + rest).to_bytes() if rest else b""
    except Exception as error:  # hivemind's parser raises whatever its codecs meet
        raise ValueError(f"{address!r} is not a multiaddr") from error
    return bytes(out)


def decode_multiaddr(data: bytes) -> str:
    """The text form of a binary multiaddr from p2pd."""
    return str(Multiaddr(data))


def check_port_is_free(address: str) -> None:
    """Raise `PortInUse` if the port of a multiaddr to listen on is taken, `NetworkError` if it cannot be had."""
    found = re.match(r"/(ip4|ip6)/([^/]+)/(tcp|udp)/(\d+)(?:/|$)", address)
    if found is None:
        raise NetworkError(f"cannot listen on {address!r}: expected a multiaddr like /ip4/0.0.0.0/tcp/0")
    family, host, transport, port = found.groups()
    kind = socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM
    try:
        with socket.socket(socket.AF_INET if family == "ip4" else socket.AF_INET6, kind) as probe:
            if transport == "tcp":  # else a connection in TIME_WAIT counts as taken; a listener still does
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except OverflowError:
        raise NetworkError(f"cannot listen on {address}: a port is at most 65535") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use by another program; stop it, or set another port (0 takes a free one)"
            ) from None
        raise NetworkError(f"cannot listen on {address}: {error.strerror or error}") from error


async def _death_signal_prefix() -> list[str]:
    """Command prefix under which p2pd is killed by the kernel when this process dies. Empty where there is none."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        return []
    prefix = [setpriv, "--pdeathsig", "KILL"]
    # BusyBox has a setpriv without this option: try it.
    silent = asyncio.subprocess.DEVNULL
    trial = await asyncio.create_subprocess_exec(*prefix, "true", stdin=silent, stdout=silent, stderr=silent)
    return prefix if await trial.wait() == 0 else []
