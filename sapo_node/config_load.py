"""Where settings come from: defaults, the file, the environment, `--set`; later ones win.

Every value remembers its place, so that `config show --origin` can tell it and an error can point at it. All errors
are reported at once: a misspelt setting is read as the one it most likely means, so that the rules behind it are
checked in the same run.

This module is light (PyYAML): pydantic is imported by `load`, and not by `data_dir_of`, which `status` needs.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sapo_node import config_yaml
from sapo_node.config_yaml import Key, Mark
from sapo_node.config_yaml import Path as KeyPath
from sapo_node.errors import ConfigError

if TYPE_CHECKING:
    from sapo_node.config import NodeConfig

PREFIX = "SAPO_NODE_"
DEFAULT_DATA_DIR = "sapo-data"  # as in config.py, which is not imported here for its weight; a test compares

Kind = Literal["default", "file", "environment", "--set"]
_ORDER: dict[Kind, int] = {"default": 0, "file": 1, "environment": 2, "--set": 3}


@dataclass(frozen=True)
class Origin:
    """Where a value came from."""

    kind: Kind
    place: str
    """default, `node.yaml:12`, the environment variable, or `--set training.lr`."""

    mark: Mark | None = None
    """Line and column in the file."""

    path: KeyPath = ()
    """What an environment variable or `--set` names; () for the file."""


DEFAULT = Origin("default", "default")
RECIPE = Origin("default", "training.recipe: wide")


@dataclass(frozen=True)
class Loaded:
    """Checked settings and where each came from."""

    config: "NodeConfig"
    origins: dict[str, Origin]
    """By dotted name, `training.lr`; a setting that is not in here has its default."""

    path: Path | None = None
    """The file, as it was named."""

    def origin(self, name: str) -> Origin:
        """Origin of one setting, by its dotted name."""
        section, _, setting = name.partition(".")
        by_recipe = setting in self.config.recipe.get(section, {})
        return self.origins.get(name, RECIPE if by_recipe else DEFAULT)


@dataclass
class Layers:
    """All that was given, merged but not yet checked. `keys` and `values` tell the place of each by path."""

    file: str
    data: Any = field(default_factory=dict)
    keys: dict[KeyPath, Origin] = field(default_factory=dict)
    values: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[tuple[Origin, str]] = field(default_factory=list)

    def complain(self, origin: Origin, path: KeyPath, message: str) -> None:
        """Note a problem of the setting at `path`, which `origin` gave."""
        place = origin.place
        if origin.kind == "file" and origin.mark:
            place = f"{self.file}:{origin.mark.line}:{origin.mark.column}"
        name = dotted(path) if path and path != origin.path else ""
        line = ": ".join(part for part in (place, name, message) if part)
        if line not in (known for _, known in self.problems):
            self.problems.append((origin, line))

    def origin(self, path: KeyPath, *, key: bool = False) -> Origin:
        """Place of a value (or of its key): its own, else that of the nearest mapping around it."""
        first = (self.keys.get(path) or self.values.get(path)) if key else self.values.get(path)
        while first is None and path:
            path = path[:-1]
            first = self.values.get(path)
        return first or Origin("file", self.file)

    def put(self, path: KeyPath, value: Any, origin: Origin) -> None:
        """Set one value. A mapping is merged into the one that is there; anything else is replaced."""
        node = self.data
        for depth, key in enumerate(path[:-1], start=1):
            if node.get(key) is None:
                node[key] = {}
                self.values[path[:depth]] = origin
            node = node[key]
            if not isinstance(node, dict):
                kind = "a list, which can only be set as a whole" if isinstance(node, list) else "not a section"
                self.complain(origin, path, f"'{dotted(path[:depth])}' is {kind}")
                return
        if isinstance(value, dict) and isinstance(node.get(path[-1]), dict):
            for name, inner in value.items():
                self.put((*path, name), inner, origin)
            return
        node[path[-1]] = value
        for places in (self.keys, self.values):
            for old in [known for known in places if known[: len(path)] == path]:
                del places[old]
            places[path] = origin
        if isinstance(value, dict):
            self.values.update({(*path, name): origin for name in value})

    def rename(self, old: KeyPath, new: Key | None) -> None:
        """Give a misspelt setting the name it most likely means; drop it where that is unknown or taken."""
        node = self.data
        for key in old[:-1]:
            node = node[key]
        value = node.pop(old[-1])
        if new is None or new in node:
            return
        node[new] = value
        for places in (self.keys, self.values):
            for path in [known for known in places if known[: len(old)] == old]:
                places[(*old[:-1], new, *path[len(old) :])] = places.pop(path)

    def raise_problems(self) -> None:
        """Raise ConfigError with everything that was noted, in the order of the file."""
        if self.problems:
            ordered = sorted(
                self.problems, key=lambda problem: (_ORDER[problem[0].kind], problem[0].mark or Mark(0, 0))
            )
            raise ConfigError([line for _, line in ordered])


def load(path: Path | None, env: Mapping[str, str], sets: Iterable[str] = (), base: Path | None = None) -> Loaded:
    """Settings from defaults, the file `path` (None: no file), the environment `env`, and `sets` ("a.b=value").

    Relative paths among them start at `base`: without it at the file's folder, or at the working directory where there
    is no file. Raises ConfigError with all problems at once.
    """
    from sapo_node import config_check

    layers = _layers(path, env, sets)
    _anchor(layers.data, (base or (path.parent if path else Path())).absolute())
    config = config_check.check(layers)
    origins = {dotted(name): layers.origin(name, key=True) for name in layers.values if len(name) == 2}
    return Loaded(config, origins, path)


def data_dir_of(path: Path | None, env: Mapping[str, str], sets: Iterable[str] = ()) -> Path:
    """The data directory that `load` would give, without checking any other setting: absolute. Raises ConfigError."""
    layers = _layers(path, env, sets)
    node = layers.data.get("node")
    if not isinstance(node, dict | None):
        layers.complain(layers.origin(("node",)), ("node",), "must be a section of settings, not a single value")
    _anchor(layers.data, (path.parent if path else Path()).absolute())
    value = (layers.data.get("node") or {}).get("data_dir") if not layers.problems else None
    if not isinstance(value, str):
        layers.complain(layers.origin(("node", "data_dir")), ("node", "data_dir"), "must be a path")
    layers.raise_problems()
    return Path(str(value))


def dotted(path: KeyPath) -> str:
    """`tasks.mixture.0.name`."""
    return ".".join(str(part) for part in path)


def variable(path: KeyPath) -> str:
    """Environment variable of a setting: SAPO_NODE_TRAINING__LR."""
    return PREFIX + "__".join(str(part).upper() for part in path)


def _layers(path: Path | None, env: Mapping[str, str], sets: Iterable[str]) -> Layers:
    """File, environment and `--set`, merged. Raises ConfigError when the file has no settings that could be checked."""
    layers = Layers(str(path) if path else "settings")
    usable = _add_file(layers, path) if path else True
    for name in sorted(env):
        if name.startswith(PREFIX):
            _add_variable(layers, name, env[name])
    for item in sets:
        _add_set(layers, item)
    if not usable:
        layers.raise_problems()
    return layers


def _add_file(layers: Layers, path: Path) -> bool:
    """Read and merge the file; False when there is nothing in it that could be checked."""
    text = _read(layers, path)
    if text is None:
        return False
    document = config_yaml.parse(text)
    for fault in document.faults:
        layers.complain(Origin("file", layers.file, fault.mark), fault.path, fault.message)
    if document.data is None:
        return not document.faults
    if not isinstance(document.data, dict):
        layers.complain(
            Origin("file", layers.file, Mark(1, 1)), (), "must hold settings like `training:`, not one value"
        )
        return False
    layers.data = document.data
    for places, marks in ((layers.keys, document.keys), (layers.values, document.values)):
        places.update({at: Origin("file", f"{layers.file}:{mark.line}", mark) for at, mark in marks.items()})
    return True


def _read(layers: Layers, path: Path) -> str | None:
    """The file's text, or None after a complaint."""
    origin = Origin("file", layers.file)
    try:
        with open(path, "rb") as stream:
            data = stream.read(config_yaml.MAX_BYTES + 1)
    except FileNotFoundError:
        layers.complain(origin, (), "there is no such file; `sapo-node init` writes one")
        return None
    except IsADirectoryError:
        layers.complain(origin, (), "is a directory; name the YAML file in it")
        return None
    except OSError as error:
        layers.complain(origin, (), f"cannot be read: {error.strerror}")
        return None
    if len(data) > config_yaml.MAX_BYTES:
        layers.complain(origin, (), f"is larger than {config_yaml.MAX_BYTES >> 20} MiB, so it is no file of settings")
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        mark = Mark(before.count(b"\n") + 1, len(before) - before.rfind(b"\n"))
        layers.complain(
            Origin("file", layers.file, mark),
            (),
            f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8",
        )
        return None


def _add_variable(layers: Layers, name: str, text: str) -> None:
    words = name.removeprefix(PREFIX).split("__")
    path = tuple(word.lower() for word in words)
    origin = Origin("environment", name, path=path)
    if name != name.upper():
        layers.complain(origin, path, f"unknown setting; names are in capitals: {name.upper()}")
    else:
        _add_text(layers, path, text, origin)


def _add_set(layers: Layers, item: str) -> None:
    name, equals, text = item.partition("=")
    path = tuple(name.strip().split("."))
    origin = Origin("--set", f"--set {name.strip()}", path=path)
    if not equals:
        layers.complain(origin, path, "has no value; write it as --set training.lr=3e-4")
    else:
        _add_text(layers, path, text, origin)


def _add_text(layers: Layers, path: KeyPath, text: str, origin: Origin) -> None:
    """A value given as YAML, as in `3e-4` or `[a, b]`."""
    document = config_yaml.parse(text)
    for fault in document.faults:
        layers.complain(origin, path, fault.message)
    if not document.faults:
        layers.put(path, document.data, origin)


def _anchor(data: dict[str, Any], base: Path) -> None:
    """Make relative paths absolute, in place. What has the wrong shape stays: checking it comes later."""

    def resolved(text: str) -> str:
        return str(base / os.path.expanduser(text))

    node = data["node"] = {} if data.get("node") is None else data["node"]
    if isinstance(node, dict):
        given = node.setdefault("data_dir", DEFAULT_DATA_DIR)
        if isinstance(given, str):
            node["data_dir"] = resolved(given)
    swarm = data.get("swarm")
    for name in ("peers_file", "secret_file"):
        if isinstance(swarm, dict) and isinstance(file := swarm.get(name), str):
            swarm[name] = resolved(file)
    inference = data.get("inference")
    if isinstance(inference, dict) and isinstance(weights := inference.get("weights_dir"), str):
        inference["weights_dir"] = resolved(weights)
    training = data.get("training")
    model = training.get("model") if isinstance(training, dict) else None
    if isinstance(model, str) and model.startswith(("./", "../", "~/")):
        data["training"]["model"] = resolved(model)
    tasks = data.get("tasks")
    mixture = tasks.get("mixture") if isinstance(tasks, dict) else None
    for entry in mixture if isinstance(mixture, list) else []:
        if isinstance(entry, dict) and isinstance(file := entry.get("path"), str):
            entry["path"] = resolved(file)
