"""The node's key: one Ed25519 key file, readable by its owner alone, from which the peer id follows.

The file is libp2p's own private-key format, so p2pd reads it directly: the four bytes 08 01 12 40 (key type Ed25519,
64 bytes follow), the 32-byte seed, the 32-byte public key. It is written here and not by hivemind, which writes first
and restricts permissions afterwards: for a moment anyone on the machine could read the key.
"""

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from sapo_node import durable
from sapo_node.errors import SapoError

_KEY_HEADER: Final = bytes.fromhex("08011240")
_KEY_FILE_BYTES: Final = len(_KEY_HEADER) + 64
_PEER_ID_HEADER: Final = bytes.fromhex("002408011220")
"""Identity multihash of 36 bytes, which are libp2p's public-key message: type Ed25519, 32 bytes follow."""


class IdentityError(SapoError):
    """The key file cannot be used or written. The message names the file and the cure."""


def peer_id_from_public_key(public_key: bytes) -> str:
    """The libp2p peer id (base58) of a 32-byte Ed25519 public key."""
    if len(public_key) != 32:
        raise ValueError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
    return base58.b58encode(_PEER_ID_HEADER + public_key).decode()


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether `signature` over `data` was made by the holder of `public_key`. Malformed arguments are just False."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


class Identity:
    """A loaded key. Made by `create`, `load`, `load_or_create` or `import_`; each raises `IdentityError`.

    `path` is the key file, `public_key` its 32 bytes, `peer_id` the libp2p id in base58.
    """

    __slots__ = ("_key", "path", "peer_id", "public_key")

    def __init__(self, path: Path, key: Ed25519PrivateKey) -> None:
        self.path = path
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.peer_id = peer_id_from_public_key(self.public_key)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id}, {str(self.path)!r})"

    @classmethod
    def create(cls, path: Path) -> "Identity":
        """Make a new key and write it to `path`, which must not exist."""
        key = Ed25519PrivateKey.generate()
        identity = cls(path, key)
        write_private(path, identity._file_content())
        return identity

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Read the key file at `path`."""
        return cls(path, _parse(read_private(path, _KEY_FILE_BYTES + 1, "`sapo-node init` makes one"), path))

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """Read the key file at `path`, or make it if there is none."""
        return cls.load(path) if os.path.lexists(path) else cls.create(path)

    @classmethod
    def import_(cls, source: Path, path: Path) -> "Identity":
        """Copy the key file `source` to `path`, which must not exist: the same node at another place."""
        identity = cls.load(source)
        write_private(path, identity._file_content())
        return cls.load(path)

    def export(self, destination: Path) -> None:
        """Write a copy of the key file to `destination`, which must not exist."""
        write_private(destination, self._file_content())

    def sign(self, data: bytes) -> bytes:
        """The 64-byte Ed25519 signature of `data`."""
        return self._key.sign(data)

    def _file_content(self) -> bytes:
        return _KEY_HEADER + self._key.private_bytes_raw() + self.public_key


def read_private(path: Path, limit: int, cure: str) -> bytes:
    """The first `limit` bytes of a key file that only its owner may read; checked on the open file, so that it cannot
    be swapped. Raises IdentityError, with `cure` for a file that is not there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe in its place must not hang us
        status = os.fstat(fd)
    except FileNotFoundError:
        raise IdentityError(f"{path}: there is no key file; {cure}") from None
    except OSError as error:
        raise IdentityError(f"{path}: cannot read the key file: {error.strerror}") from error
    try:
        if not stat.S_ISREG(status.st_mode):
            raise IdentityError(f"{path}: is not a file; a key file is needed here")
        if status.st_mode & 0o077:
            raise IdentityError(
                f"{path}: others on this machine may use this key (mode {stat.S_IMODE(status.st_mode):04o}); "
                f"run: chmod 600 {path}"
            )
        return os.read(fd, limit)
    finally:
        os.close(fd)


def _parse(content: bytes, path: Path) -> Ed25519PrivateKey:
    cure = "restore it from your export, or move it away to get a new key and with it a new peer id"
    if len(content) != _KEY_FILE_BYTES or not content.startswith(_KEY_HEADER):
        raise IdentityError(f"{path}: is not an Ed25519 key file of {_KEY_FILE_BYTES} bytes; {cure}")
    seed, public = content[4:36], content[36:]
    key = Ed25519PrivateKey.from_private_bytes(seed)
    if key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw) != public:
        raise IdentityError(f"{path}: is damaged, its two halves are not one key; {cure}")
    return key


def write_private(path: Path, content: bytes) -> None:
    """Write a private file that must not exist yet: whole or not at all, 0600 from its first byte, durable. Raises
    IdentityError.

    A hard link puts the finished file in place, since it, unlike a rename, fails if the name was taken meanwhile.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(fd)
            os.link(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        durable.flush(path.parent)
    except FileExistsError:
        raise IdentityError(f"{path}: exists already and is not overwritten; move it away first") from None
    except OSError as error:
        raise IdentityError(f"{path}: cannot write the key file: {error.strerror}") from error
