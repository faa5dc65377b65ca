"""`sapo-node config check` and `config show`."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from sapo_node import config_load
from sapo_node.config import NodeConfig
from sapo_node.config_load import Loaded
from sapo_node.errors import ConfigError
from sapo_node.model_shape import missing
from sapo_node.tasks import mixture
from sapo_node.tasks.dataset import DatasetError


def check(files: Sequence[Path]) -> int:
    """Check each file with the environment as it is. Raises ConfigError with the problems of all files."""
    problems: dict[str, None] = {}  # a wrong environment variable is wrong for every file, and named once
    for file in files:
        try:
            missing = _missing(config_load.load(file, os.environ).config)
        except ConfigError as error:
            problems.update(dict.fromkeys(error.problems))
            continue
        problems.update(dict.fromkeys(f"{file}: {problem}" for problem in missing))
        if not missing:
            click.echo(f"{file}: fine")
    if problems:
        raise ConfigError(list(problems))
    return 0


def _missing(config: NodeConfig) -> list[str]:
    """What the settings point to and is not there, or not as it should be: data sets and the model's folder."""
    problems = []
    try:
        mixture.load(config.tasks)
    except DatasetError as error:
        problems.append(str(error))
    if fault := missing(config.training.model):
        problems.append(f"training.model: {fault}")
    return problems


def show(file: Path | None, sets: Sequence[str], origin: bool) -> int:
    """Print all settings."""
    click.echo(render(config_load.load(file, os.environ, sets), origin))
    return 0


def render(loaded: Loaded, origin: bool) -> str:
    """All settings as YAML that `load` reads back; with `origin`, each line ends in a comment that tells the place."""
    lines: list[str] = []
    for section, settings in loaded.config.dump().items():
        lines.append(f"{section}:")
        for name, value in settings.items():
            line = f"  {name}: {_flow(value)}"
            place = loaded.origin(f"{section}.{name}").place
            lines.append(f"{line:<44}  # {place}" if origin else line)
    return "\n".join(lines)


def _flow(value: Any) -> str:
    """A value as one line of YAML: JSON is YAML, but for infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    if isinstance(value, list):
        return f"[{', '.join(_flow(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {_flow(item)}' for key, item in value.items())}}}"
    return json.dumps(value, ensure_ascii=False)
