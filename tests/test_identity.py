"""The key file: what is written, what is refused, and what the errors tell people."""

import os
import stat
from pathlib import Path

import pytest

from sapo_node.identity import Identity, IdentityError, peer_id_from_public_key, verify


@pytest.fixture
def key(tmp_path: Path) -> Identity:
    return Identity.create(tmp_path / "identity.key")


def test_file_is_libp2ps_ed25519_format_and_private(key: Identity) -> None:
    content = key.path.read_bytes()
    assert (len(content), content[:4], content[36:]) == (68, bytes.fromhex("08011240"), key.public_key)
    assert stat.S_IMODE(key.path.stat().st_mode) == 0o600
    assert os.listdir(key.path.parent) == ["identity.key"], "the temporary file is gone"


def test_file_is_private_under_a_loose_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        Identity.create(tmp_path / "k")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600


def test_load_gives_the_same_node(key: Identity) -> None:
    again = Identity.load(key.path)
    assert (again.peer_id, again.public_key) == (key.peer_id, key.public_key)
    assert verify(key.public_key, b"data", again.sign(b"data"))


def test_peer_id_of_a_known_key() -> None:
    # RFC 8032's first test key; the id is what p2pd says of it.
    public = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    assert peer_id_from_public_key(public) == "12D3KooWQK1wnefoLrcVHbbnf5tLzbopUd3K3bFAoJpA7YJgL5pV"
    with pytest.raises(ValueError, match="32 bytes"):
        peer_id_from_public_key(public[:-1])


def test_signature_binds_key_data_and_signature(key: Identity, tmp_path: Path) -> None:
    signature = key.sign(b"data")
    other = Identity.create(tmp_path / "other")
    assert len(signature) == 64
    assert verify(key.public_key, b"data", signature)
    assert not verify(key.public_key, b"date", signature)
    assert not verify(other.public_key, b"data", signature)
    assert not verify(key.public_key, b"data", signature[:-1])
    assert not verify(b"short", b"data", signature)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o601, 0o610, 0o660])
def test_loose_permissions_are_refused_with_the_cure(key: Identity, mode: int) -> None:
    key.path.chmod(mode)
    with pytest.raises(IdentityError, match=f"chmod 600 {key.path}"):
        Identity.load(key.path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an Ed25519 key file"),
        (b"\x08\x01\x12\x40" + bytes(63), "not an Ed25519 key file"),
        (b"\x08\x01\x12\x40" + bytes(65), "not an Ed25519 key file"),
        (b"\x08\x00\x12\x40" + bytes(64), "not an Ed25519 key file"),
        (b"\x08\x01\x12\x40" + bytes(64), "damaged"),
    ],
)
def test_wrong_contents_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "k"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match=message):
        Identity.load(path)


def test_an_existing_file_is_never_overwritten(key: Identity) -> None:
    content = key.path.read_bytes()
    with pytest.raises(IdentityError, match="exists already"):
        Identity.create(key.path)
    with pytest.raises(IdentityError, match="exists already"):
        key.export(key.path)
    assert key.path.read_bytes() == content


def test_load_or_create_creates_once(tmp_path: Path) -> None:
    first = Identity.load_or_create(tmp_path / "k")
    assert Identity.load_or_create(tmp_path / "k").peer_id == first.peer_id


def test_export_and_import_carry_the_node(key: Identity, tmp_path: Path) -> None:
    key.export(tmp_path / "copy")
    moved = Identity.import_(tmp_path / "copy", tmp_path / "moved")
    assert moved.peer_id == key.peer_id
    assert stat.S_IMODE(moved.path.stat().st_mode) == 0o600
    (tmp_path / "copy").chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        Identity.import_(tmp_path / "copy", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_missing_file_and_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="sapo-node init"):
        Identity.load(tmp_path / "none")
    with pytest.raises(IdentityError, match="cannot write"):
        Identity.create(tmp_path / "no folder" / "k")
    with pytest.raises(IdentityError, match="is not a file"):
        Identity.load(tmp_path)


def test_the_secret_is_not_in_its_repr(key: Identity) -> None:
    assert key.path.read_bytes()[4:36].hex() not in repr(key)
    assert key.peer_id in repr(key)
