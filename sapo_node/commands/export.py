"""`sapo-node export`: the newest checkpoint as a plain model folder."""

from pathlib import Path

import click

from sapo_node.datadir import DataDir
from sapo_node.errors import SapoError
from sapo_node.training import checkpoint, export


def run(data_dir: Path, out: Path) -> int:
    """Export to `out`, which must be missing or empty. Raises SapoError (torch is not needed)."""
    newest = checkpoint.latest(DataDir(data_dir).checkpoints)
    if newest is None:
        raise SapoError(f"{data_dir} holds no checkpoint yet; a node writes one every training.checkpoint_every rounds")
    try:
        export.export(newest, out)
    except OSError as error:
        raise SapoError(f"{out} cannot be written: {error.strerror or error}") from error
    click.echo(f"{out}: the model of {newest.name}; load it with AutoModelForCausalLM.from_pretrained")
    return 0
