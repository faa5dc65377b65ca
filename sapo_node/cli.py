"""The command line. Options and help texts stand here; what a command does is imported when it runs.

Importing this module costs click alone, so that `--help`, completion and `status` answer at once. Exit codes: 0 fine,
1 an error, 2 wrong usage or settings, 4 the data directory is in use by another node, 130 interrupted.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import click

from sapo_node import stop_signal
from sapo_node.errors import ConfigError, SapoError

DEFAULT_CONFIG = Path("node.yaml")
INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path, dir_okay=False)
_FOLDER = click.Path(path_type=Path, file_okay=False)


def _sets(command: Command) -> Command:
    return click.option(
        "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change one setting, as in training.lr=3e-4."
    )(command)


def _config(command: Command) -> Command:
    return click.option("--config", "config_path", type=_FILE, help="The node's settings; node.yaml if it is here.")(
        command
    )


def _where(command: Command) -> Command:
    """The two ways to say which node is meant."""
    data_dir = click.option("--data-dir", type=_FOLDER, help="The node's data directory, instead of --config.")
    return _config(data_dir(command))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="sapo-node", message="%(prog)s %(version)s")
def cli() -> None:
    """A node of a swarm that trains language models together, with no one in charge.

    `sapo-node swarm --nodes 4 --demo` shows four nodes on this machine. `sapo-node init` sets up a node of your own.
    """


@cli.command()
@click.argument("directory", type=_FOLDER, default=".")
@click.option("--model", help="What to train: demo, benchmark, a folder, or a Hugging Face name.")
@_sets
def init(directory: Path, model: str | None, sets: tuple[str, ...]) -> int:
    """Write a commented node.yaml and a new key into DIRECTORY (default: here).

    Says which engine would sample and how much memory is needed, and writes nothing where that is more than there is.
    """
    from sapo_node.commands import init as command

    return command.run(directory, model, sets)


@cli.command()
@click.option("--config", "config_path", type=_FILE, default=DEFAULT_CONFIG, show_default=True, help="Its settings.")
@_sets
def start(config_path: Path, sets: tuple[str, ...]) -> int:
    """Run a node until it is stopped (Ctrl-C or SIGTERM; a second one stops it at once)."""
    with stop_signal.held():
        from sapo_node import config_load

        loaded = config_load.load(config_path, os.environ, sets)
        from sapo_node import node

        return node.run(loaded)


@cli.command()
@_config
@_sets
@click.option("--addresses", type=_FILE, help="Also write the addresses to hand around to FILE (swarm.peers_file).")
def bootstrap(config_path: Path | None, sets: tuple[str, ...], addresses: Path | None) -> int:
    """Run a small process, without a model, that others join the swarm by. Ends like `start`."""
    with stop_signal.held():
        from sapo_node import config_load

        loaded = config_load.load(_given_or_here(config_path), os.environ, sets)
        from sapo_node.commands import bootstrap as command

        return command.run(loaded, addresses)


@cli.command()
@click.option("--nodes", type=click.IntRange(1, 64), default=4, show_default=True, help="How many.")
@click.option("--rounds", type=click.IntRange(min=1), help="End when every node has taken this many rounds.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="End after this time.")
@click.option("--demo", is_flag=True, help="The demo: embedded model, small tasks, other weights of them in each node.")
@click.option("--config", "config_path", type=_FILE, help="Settings that all nodes start from.")
@_sets
@click.option("--dir", "directory", type=_FOLDER, help="Where the nodes' directories, logs and the plot go.")
def swarm(
    nodes: int,
    rounds: int | None,
    minutes: float | None,
    demo: bool,
    config_path: Path | None,
    sets: tuple[str, ...],
    directory: Path | None,
) -> int:
    """Run several nodes on this machine, over loopback only, with one live table."""
    if rounds is not None and minutes is not None:
        raise click.UsageError("--rounds and --minutes both say when to end; give one of them.")
    from sapo_node import local_swarm

    return local_swarm.run(
        nodes=nodes,
        rounds=rounds,
        minutes=minutes,
        demo=demo,
        config_path=config_path,
        sets=sets,
        directory=directory,
    )


@cli.command("eval")
@_config
@_sets
@click.option("--checkpoint", type=_FOLDER, help="Model folder to measure, instead of the node's newest checkpoint.")
@click.option("--samples", type=click.IntRange(1, 64), default=1, show_default=True, help="Answers a question.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(
    config_path: Path | None, sets: tuple[str, ...], checkpoint: Path | None, samples: int, as_json: bool
) -> int:
    """Measure a model on the held-out questions of the tasks in the settings."""
    from sapo_node import config_load

    loaded = config_load.load(_given_or_here(config_path), os.environ, sets)
    from sapo_node import evaluate as command

    return command.run(loaded=loaded, checkpoint=checkpoint, samples=samples, as_json=as_json)


@cli.command()
@_where
@click.argument("out", type=_FOLDER)
def export(config_path: Path | None, data_dir: Path | None, out: Path) -> int:
    """Write the newest checkpoint's model to OUT, as a folder that transformers loads."""
    from sapo_node.commands import export as command

    return command.run(_data_dir(config_path, data_dir), out)


@cli.command()
@_where
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--ready", is_flag=True, help="Exit code 1 also while it starts, drains or is silent.")
def status(config_path: Path | None, data_dir: Path | None, as_json: bool, ready: bool) -> int:
    """Say what a node is doing. Exit code 0 when it runs, 1 when it does not."""
    from sapo_node.commands import status as command

    return command.run(_data_dir(config_path, data_dir), as_json, ready)


@cli.group(invoke_without_command=True)
@_where
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--why", metavar="ID", help="Say what the node thinks of one peer, and for which reasons.")
@click.pass_context
def peers(
    context: click.Context, config_path: Path | None, data_dir: Path | None, as_json: bool, why: str | None
) -> int:
    """List the peers that a node met: where they are, how they were found, what they were good for."""
    if context.invoked_subcommand:
        if as_json or why or config_path or data_dir:
            raise click.UsageError(
                f"Options stand behind the command: sapo-node peers {context.invoked_subcommand} ..."
            )
        return 0
    from sapo_node.commands import peers as command

    where = _data_dir(config_path, data_dir)
    return command.run(where, as_json) if why is None else command.why(where, why, as_json)


@peers.command()
@_where
@click.argument("peer_id", metavar="ID")
@click.option("--purge", is_flag=True, help="Also remove its groups from the pool.")
def deny(config_path: Path | None, data_dir: Path | None, peer_id: str, purge: bool) -> int:
    """Give the peer ID no answer and take nothing from it, also after a restart. A running node obeys in seconds."""
    from sapo_node.commands import peers as command

    return command.deny(_data_dir(config_path, data_dir), peer_id, purge)


@peers.command()
@_where
@click.argument("peer_id", metavar="ID")
def allow(config_path: Path | None, data_dir: Path | None, peer_id: str) -> int:
    """Take back what `peers deny` said of the peer ID. The settings (swarm.deny, swarm.allow) hold as before."""
    from sapo_node.commands import peers as command

    return command.allow(_data_dir(config_path, data_dir), peer_id)


@cli.command("swarm-key")
@click.argument("file", type=_FILE)
def swarm_key(file: Path) -> int:
    """Write a new key of a private swarm to FILE (swarm.secret_file), readable by its owner alone."""
    from sapo_node.swarm import secret

    secret.make(file)
    click.echo(f"{file}: the key of a private swarm; give each of its nodes a copy with mode 0600, and nobody else one")
    return 0


@cli.command("id")
@_where
def peer_id(config_path: Path | None, data_dir: Path | None) -> int:
    """Print the node's peer id."""
    from sapo_node.commands import init as command

    click.echo(command.peer_id(_data_dir(config_path, data_dir)))
    return 0


@cli.group()
def config() -> None:
    """Check settings, or show where each value comes from."""


@config.command("check")
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
def config_check(files: tuple[Path, ...]) -> int:
    """Name every error in the FILES, or say that there is none."""
    from sapo_node.commands import settings as command

    return command.check(files)


@config.command("show")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@_sets
@click.option("--origin", is_flag=True, help="Say for each value where it comes from.")
def config_show(file: Path | None, sets: tuple[str, ...], origin: bool) -> int:
    """Print every setting as a node started with FILE would have it; without FILE, the defaults."""
    from sapo_node.commands import settings as command

    return command.show(file, sets, origin)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print the completion script of a SHELL.

    For bash, add this to ~/.bashrc: eval "$(sapo-node completion bash)". For zsh the same, with zsh, in ~/.zshrc. For
    fish: sapo-node completion fish > ~/.config/fish/completions/sapo-node.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells that are offered"
    click.echo(kind(cli, {}, "sapo-node", "_SAPO_NODE_COMPLETE").source())
    return 0


def _given_or_here(config_path: Path | None) -> Path | None:
    """The config file that was named, else node.yaml of the working directory, else none."""
    return config_path or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None)


def _data_dir(config_path: Path | None, data_dir: Path | None) -> Path:
    """The data directory that the two options of `_where` mean."""
    if config_path and data_dir:
        raise click.UsageError("--config and --data-dir both say which node is meant; give one of them.")
    if data_dir:
        return data_dir
    from sapo_node import config_load

    return config_load.data_dir_of(_given_or_here(config_path), os.environ)


def run(arguments: list[str]) -> int:
    """Run one command line; the exit code. What is a person's to cure is printed; a fault of ours is raised."""
    try:
        code = cli.main(arguments, prog_name="sapo-node", standalone_mode=False)
        sys.stdout.flush()  # here, where a reader that is gone can still be handled
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ConfigError as error:
        _say_error(str(error))
        return error.exit_code
    except SapoError as error:
        _say_error(f"error: {error}")
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:  # as in `sapo-node config show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code if isinstance(code, int) else 0


def _say_error(text: str) -> None:
    from sapo_node.monitor.text import harmless  # an error may quote what came from others

    click.echo(harmless(text), err=True)


def _show_fault(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.__excepthook__(kind, error, trace)
    click.echo("This is a fault of sapo-node. Please report it, with the lines above, as an issue.", err=True)


def main() -> None:
    """Entry point of the program."""
    sys.excepthook = _show_fault
    sys.exit(run(sys.argv[1:]))
