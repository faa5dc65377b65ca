"""`sapo-node init` and `sapo-node id`: a new node's settings and key."""

import os
from importlib import resources
from pathlib import Path

import click

from sapo_node import config_load
from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.identity import Identity, IdentityError

FILE_NAME = "node.yaml"


def template() -> str:
    """The commented node.yaml; configs/node.yaml is the same text."""
    return resources.files("sapo_node").joinpath("templates", FILE_NAME).read_text(encoding="utf-8")


def run(directory: Path) -> int:
    """Write node.yaml and the key; overwrite neither. Raises SapoError."""
    file = directory / FILE_NAME
    if os.path.lexists(file):
        raise SapoError(f"{file} exists and is not overwritten; move it away, or name another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SapoError(f"{directory} cannot be made: {error.strerror}") from error
    data = DataDir(directory.absolute() / config_load.DEFAULT_DATA_DIR)
    data.prepare()
    kept = os.path.lexists(data.key)
    try:
        identity = Identity.load_or_create(data.key)
    except IdentityError as error:
        raise SapoError(str(error)) from error
    try:
        with open(file, "x", encoding="utf-8") as stream:
            stream.write(template())
    except OSError as error:
        raise SapoError(f"{file} cannot be written: {error.strerror}") from error
    click.echo(_report(file, data, identity.peer_id, kept))
    return 0


def _report(file: Path, data: DataDir, peer: str, kept: bool) -> str:
    return f"""\
Settings: {file}
Key:      {data.key} ({"kept, it was there" if kept else "new"}). Whoever has this file is this node: keep it private.
Peer id:  {peer}

A node in a swarm is public: others see its IP address, its peer id, and the questions and completions that it shares.
Set swarm.enabled: false in {file.name} to train alone, without any network.

Next:
  1. Open {file}: choose the model and the tasks, and name a node to join by (swarm.initial_peers).
  2. sapo-node config check {file}
  3. sapo-node start --config {file}"""


def peer_id(data_dir: Path) -> str:
    """Peer id of the key in a data directory. Raises SapoError where there is none, or none that may be used."""
    try:
        return Identity.load(DataDir(data_dir).key).peer_id
    except IdentityError as error:
        raise SapoError(str(error)) from error
