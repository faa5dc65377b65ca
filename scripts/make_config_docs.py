"""Writes docs/configuration.md from the docstrings in sapo_node/config.py.

python scripts/make_config_docs.py            write it
python scripts/make_config_docs.py --check    exit 1 when it is not up to date
"""

import argparse
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from sapo_node.config import NodeConfig, TaskEntry
from sapo_node.config_training import WIDE

TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"

INTRO = """\
# Configuration

<!-- Made by scripts/make_config_docs.py from sapo_node/config.py; change it there. -->

A node reads one YAML file, with one section for each part of the program. `configs/node.yaml` is the commented file to
copy (`sapo-node init` writes it). Every setting has a default; an empty file is a valid one.

A value is taken from the first of these that has it:

1. `--set training.lr=3e-4` on the command line (once a setting);
2. the environment: `SAPO_NODE_TRAINING__LR=3e-4`, two underscores between section and setting;
3. the file;
4. the default: that of `training.recipe`, if it says something of the setting.

Values of `--set` and of the environment are YAML: `--set 'tasks.mixture=[{name: bf}]'`. Relative paths start at the
folder of the config file. `sapo-node config check FILE` names every mistake with its line; `sapo-node config show FILE
--origin` tells where each value comes from. A variable that begins with `SAPO_NODE_` and is no setting is an error.
"""

BOUNDS = {"exclusiveMinimum": "> {}", "minimum": ">= {}", "exclusiveMaximum": "< {}", "maximum": "<= {}"}
KINDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "empty",
    "object": "settings",
}


def kind(schema: dict[str, Any]) -> str:
    """A JSON schema in words: "whole number > 0, or empty"."""
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "anyOf" in schema:
        return ", or ".join(kind(option) for option in schema["anyOf"])
    if schema.get("type") == "array":
        if "prefixItems" in schema:
            return "list: " + ", then ".join(kind(item) for item in schema["prefixItems"])
        if "$ref" in schema["items"]:
            return "list of tasks"
        return "list of multiaddrs" if "maxLength" in schema["items"] else f"list of {kind(schema['items'])}s"
    name = "path" if schema.get("format") == "path" else KINDS[schema["type"]]
    if "maxLength" in schema:
        return f"{name} of {schema['minLength']} to {schema['maxLength']} characters"
    limits = [text.format(schema[key]) for key, text in BOUNDS.items() if key in schema]
    return " ".join([name, " and ".join(limits)]) if limits else name


def table(model: type[BaseModel], wide: Mapping[str, Any] = MappingProxyType({})) -> str:
    """One row a setting; `wide` has what the recipe of that name says of them."""
    rows = ["| setting | value | default | |", "|---|---|---|---|"]
    properties = model.model_json_schema()["properties"]
    for name, info in model.model_fields.items():
        if name == "mixture":
            default = "`basic_arithmetic` and `base_conversion`"
        elif info.is_required():
            default = "none: must be given"
        else:
            value = info.get_default(call_default_factory=True, validated_data={})
            default = "empty" if value in (None, "") else f"`{json.dumps(value, default=str)}`"
        if name in wide:
            default += f"; `{json.dumps(wide[name])}` under `recipe: wide`"
        about = " ".join((info.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {kind(properties[name])} | {default} | {about} |")
    return "\n".join(rows)


def document() -> str:
    """The whole page."""
    parts = [INTRO]
    for name, info in NodeConfig.model_fields.items():
        model = info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        parts.append(f"## {name}\n\n{inspect.getdoc(model)}\n\n{table(model, WIDE.get(name, {}))}\n")
        if name == "tasks":
            parts.append(f"### An entry of tasks.mixture\n\n{inspect.getdoc(TaskEntry)}\n\n{table(TaskEntry)}\n")
    return "\n".join(parts)


def main() -> int:
    """Write or check; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        TARGET.write_text(document(), encoding="utf-8")
        return 0
    if TARGET.exists() and TARGET.read_text(encoding="utf-8") == document():
        return 0
    print(f"{TARGET} is not up to date; run: python scripts/make_config_docs.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
