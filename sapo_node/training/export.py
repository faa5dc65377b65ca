"""A checkpoint as a plain Hugging Face model folder, for use without this program."""

import shutil
from pathlib import Path

from sapo_node.training.checkpoint import TRAINER_FILES, CheckpointError, read_state


def export(checkpoint: Path, out: Path) -> None:
    """Copy a checkpoint's model and tokenizer to `out`, which must not exist or be empty.

    `AutoModelForCausalLM.from_pretrained(out)` loads it. Raises CheckpointError.
    """
    read_state(checkpoint)  # refuses what is no checkpoint, or a newer one
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists already; name a new or an empty folder")
    shutil.copytree(checkpoint, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*TRAINER_FILES))
