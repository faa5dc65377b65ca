"""Merged settings to a NodeConfig, or to plain sentences about everything that is wrong with them.

Pydantic finds the faults, strictly (a text is never read as a number); this module turns each into a sentence at the
place that the value came from.
"""

import difflib
import json
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from sapo_node.config import NodeConfig
from sapo_node.config_load import Layers, Origin, dotted, variable
from sapo_node.config_yaml import Path as KeyPath

if typing.TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MAX_PASSES = 8  # misspelt names inside misspelt sections show one level a pass; settings nest 6 deep
MAX_SHOWN = 40  # characters of a wrong value that a message repeats
_WORDS = re.compile(r"[a-z_]+(?:\.[a-z_]+)*")


def check(layers: Layers) -> NodeConfig:
    """The checked settings. Raises ConfigError with every problem, those noted in `layers` before included."""
    for name, value in layers.data.items():
        if value is None and name in NodeConfig.model_fields:
            layers.data[name] = {}  # a section whose every line is a comment
    config: NodeConfig | None = None
    for _ in range(MAX_PASSES):
        errors: list[ErrorDetails] = []
        try:
            config = NodeConfig.model_validate_json(json.dumps(layers.data), strict=True)
        except ValidationError as error:
            errors = error.errors(include_url=False)
        unknown = [error["loc"] for error in errors if error["type"] == "extra_forbidden"]
        for path in unknown:
            _report_unknown(layers, path)
        if not unknown:
            _report(layers, errors)
            break
    layers.raise_problems()
    assert config is not None, "either there are settings or there is a problem"
    return config


def _report_unknown(layers: Layers, path: KeyPath) -> None:
    """Name an unknown setting and what it probably means, then rename it so, that its value is checked too."""
    origin = layers.origin(path, key=True)
    meant = _meant(path)
    hint = f"; did you mean {_spelt(meant, path, origin)}?" if meant else ""
    layers.complain(origin, path, f"unknown setting{hint}")
    layers.rename(path, meant[-1] if meant and meant[:-1] == path[:-1] else None)


def _meant(path: KeyPath) -> KeyPath | None:
    """The setting that an unknown one most likely means: one of that name elsewhere, else a similar one beside it."""
    name = str(path[-1])
    if name in NodeConfig.model_fields:
        return (name,)
    for section in NodeConfig.model_fields:
        model = _model_at((section,))
        if model and name in model.model_fields:
            return (section, name)
    beside = _model_at(path[:-1])
    close = difflib.get_close_matches(name, beside.model_fields if beside else (), n=1)
    return (*path[:-1], close[0]) if close else None


def _spelt(meant: KeyPath, given: KeyPath, origin: Origin) -> str:
    """A suggestion in the spelling of the place where it is to be typed."""
    if origin.path == given:
        return variable(meant) if origin.kind == "environment" else f"'{dotted(meant)}'"
    return f"'{meant[-1]}'" if meant[:-1] == given[:-1] else f"'{dotted(meant)}'"


def _model_at(path: KeyPath) -> type[BaseModel] | None:
    """The section that lies at a path."""
    model: type[BaseModel] = NodeConfig
    for part in path:
        if isinstance(part, int):
            continue
        known = model.model_fields.get(part)
        kinds = (known.annotation, *get_args(known.annotation)) if known else ()
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return None
        model = inner[0]
    return model


def _report(layers: Layers, errors: "list[ErrorDetails]") -> None:
    """Note each error once: a value that fits no alternative of a union fails once an alternative."""
    seen: set[KeyPath] = set()
    for error in errors:
        path, rest = _split(error["loc"], layers.data)
        if error["type"] == "missing" and rest and isinstance(rest[0], str):
            layers.complain(layers.origin(path), (*path, rest[0]), "is missing")
        elif error["type"] == "value_error":
            _report_rule(layers, path, str(error["ctx"]["error"]))
        elif path not in seen:
            seen.add(path)
            message = _choices(error) if rest and error["type"] != "missing" else _sentence(error)
            layers.complain(layers.origin(path), path, message)


def _report_rule(layers: Layers, path: KeyPath, message: str) -> None:
    """Note a broken rule between settings at the first of them that somebody set."""
    named = [(*path, *word.split(".")) for word in _WORDS.findall(message)]
    place = next((layers.values[name] for name in named if name in layers.values), None)
    origin = place or layers.origin(path)
    if path and path[:-1] == origin.path and isinstance(path[-1], int):  # an entry of a list that was set as a whole
        layers.complain(origin, origin.path, f"entry {path[-1] + 1}: {message}")
        return
    # A rule names its settings itself, so the place is enough: the path would repeat or contradict one of them.
    layers.complain(Origin(origin.kind, origin.place, origin.mark), path, message)


def _split(loc: tuple[str | int, ...], data: Any) -> tuple[KeyPath, KeyPath]:
    """An error's location as the part that exists in the data and pydantic's own parts behind it."""
    for depth, part in enumerate(loc):
        inside = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if not inside:
            return loc[:depth], loc[depth:]
        data = data[part]
    return loc, ()


def _choices(error: "ErrorDetails") -> str:
    return f"must be a number, a text, true or false, or a list of those, not {shown(error['input'])}"


def shown(value: Any) -> str:
    """A value as a message repeats it."""
    if isinstance(value, dict):
        return "a section of settings"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "empty"
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "...'"


def _one_of(context: Mapping[str, Any], value: Any) -> str:
    choices = re.findall(r"'([^']*)'", str(context["expected"]))
    close = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"must be {context['expected']}, not {shown(value)}{hint}"


def _text(_: Mapping[str, Any], value: Any) -> str:
    return f"must be a text, not {shown(value)}" + (
        "; put it in quotes" if isinstance(value, bool | int | float) else ""
    )


def _number(_: Mapping[str, Any], value: Any) -> str:
    return f"must be a number, not {shown(value)}" + ("; leave out the quotes" if _quoted_number(value) else "")


def _whole(_: Mapping[str, Any], value: Any) -> str:
    return f"must be a whole number, not {shown(value)}" + ("; leave out the quotes" if _quoted_number(value) else "")


def _quoted_number(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[-+0-9.eE]*[0-9]", value) is not None


Sentence = Callable[[Mapping[str, Any], Any], str]
_SENTENCES: dict[str, Sentence] = {
    "literal_error": _one_of,
    "string_type": _text,
    "path_type": _text,
    "float_type": _number,
    "int_type": _whole,
    "int_from_float": _whole,
    "bool_type": lambda _, value: f"must be true or false, not {shown(value)}",
    "list_type": lambda _, value: f"must be a list, not {shown(value)}",
    "tuple_type": lambda _, value: f"must be a list, not {shown(value)}",
    "dict_type": lambda _, value: f"must be settings (name: value), not {shown(value)}",
    "model_type": lambda _, value: f"must be settings (name: value), not {shown(value)}",
    "greater_than": lambda context, value: f"must be greater than {context['gt']:g}, not {shown(value)}",
    "greater_than_equal": lambda context, value: f"must be {context['ge']:g} or more, not {shown(value)}",
    "less_than": lambda context, value: f"must be less than {context['lt']:g}, not {shown(value)}",
    "less_than_equal": lambda context, value: f"must be {context['le']:g} or less, not {shown(value)}",
    "finite_number": lambda _, value: "must be a finite number",
    "string_too_short": lambda context, _: f"must have {context['min_length']} or more characters",
    "string_too_long": lambda context, _: f"must have {context['max_length']} or fewer characters",
    "string_pattern_mismatch": lambda context, value: f"{shown(value)} does not match {context['pattern']}",
    "too_short": lambda context, _: f"must have {context['min_length']} or more entries",
    "too_long": lambda context, _: f"must have {context['max_length']} or fewer entries",
    "missing": lambda *_: "has too few values",
}


def _sentence(error: "ErrorDetails") -> str:
    known = _SENTENCES.get(error["type"])
    if known:
        return known(error.get("ctx", {}), error["input"])
    return f"{error['msg'][:1].lower()}{error['msg'][1:]} (given: {shown(error['input'])})"
