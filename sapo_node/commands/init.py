"""`sapo-node init` and `sapo-node id`: a new node's settings and key."""

import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import click

from sapo_node import config_load, config_yaml, licence
from sapo_node.datadir import DataDir
from sapo_node.errors import ConfigError, SapoError
from sapo_node.identity import Identity, IdentityError

FILE_NAME = "node.yaml"


def template() -> str:
    """The commented node.yaml; configs/node.yaml is the same text."""
    return resources.files("sapo_node").joinpath("templates", FILE_NAME).read_text(encoding="utf-8")


def run(directory: Path, model: str | None = None, sets: Sequence[str] = ()) -> int:
    """Write node.yaml and the key; overwrite neither. `model` and `sets` (KEY=VALUE) go into node.yaml.

    Raises ConfigError for settings that cannot be used or that this machine has not the memory for, and SapoError.
    """
    file = directory / FILE_NAME
    if os.path.lexists(file):
        raise SapoError(f"{file} exists and is not overwritten; move it away, or name another directory")
    given = [*_model_settings(model), *sets]
    needed = _check(directory, given)
    text = template()
    for setting in given:
        text = with_setting(text, setting)
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
            stream.write(text)
    except OSError as error:
        raise SapoError(f"{file} cannot be written: {error.strerror}") from error
    click.echo(_report(file, data, identity.peer_id, kept, needed))
    return 0


def _model_settings(model: str | None) -> list[str]:
    """The settings that `--model` stands for. A folder becomes absolute: in a file it starts at the file's.

    Raises ConfigError for a folder that is not there, in the words of who typed it.
    """
    if model is None:
        return []
    path = Path(model).expanduser()
    if not path.is_dir() and (path.is_absolute() or model.startswith((".", "~"))):
        raise ConfigError([f"--model {model}: there is no such folder"])
    settings = [f"training.model={json.dumps(str(path.absolute()) if path.is_dir() else model)}"]
    return settings if model in ("demo", "benchmark") else [*settings, "training.licence=unknown"]


def _check(directory: Path, sets: Sequence[str]) -> str:
    """Lines on engine, memory, licence. Raises ConfigError where the settings are wrong, cannot work or do not fit."""
    from sapo_node import fit, machine

    with resources.as_file(resources.files("sapo_node") / "templates" / FILE_NAME) as path:
        config = config_load.load(path, {}, sets, base=directory).config
    try:
        note = licence.note(config)
        return "\n".join([*fit.summary(config, machine.look()), *([f"Licence:  {note}"] if note else [])])
    except ConfigError as error:
        more = "Nothing was written. `sapo-node init --set KEY=VALUE` writes other settings into node.yaml."
        raise ConfigError([*error.problems, more]) from error


def with_setting(text: str, setting: str) -> str:
    """node.yaml with one more setting ("training.lr=3e-4"), in place of its default where the file shows that.

    Raises ConfigError for what has no line of its own.
    """
    name, _, value = setting.partition("=")
    section, _, key = name.strip().partition(".")
    line = f"  {key}: {json.dumps(config_yaml.parse(value).data)}"
    found = re.search(rf"^{re.escape(section)}:\n((?:(?:  .*)?\n)*)", text, re.MULTILINE)
    if found is None or "." in key or re.search(rf"^  {re.escape(key)}:$", found[1], re.MULTILINE):
        raise ConfigError([f"--set {name.strip()}: cannot be set here; edit it in {FILE_NAME}"])
    body, count = re.subn(rf"^  (?:# )?{re.escape(key)}: .*$", lambda _: line, found[1], count=1, flags=re.MULTILINE)
    body = body if count else f"{line}\n{body}"
    return text[: found.start(1)] + body + text[found.end(1) :]


def _report(file: Path, data: DataDir, peer: str, kept: bool, needed: str) -> str:
    return f"""\
Settings: {file}
Key:      {data.key} ({"kept, it was there" if kept else "new"}). Whoever has this file is this node: keep it private.
Peer id:  {peer}
{needed}

A node in a swarm is public: others see its IP address, its peer id, and the questions and completions that it shares.
What was shared cannot be taken back. Rows of data sets stay here unless their entry says share: true.
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
