"""What commands print for programs."""

import json
from typing import Any

import click
import msgspec


def say_json(value: Any) -> None:
    """Print a value as one line of JSON, in ASCII: texts of others in it command no terminal."""
    click.echo(json.dumps(json.loads(msgspec.json.encode(value))))  # msgspec writes null for what is no number
