"""Two real nodes on a real pretrained model: does sharing rollouts train it, with a real tokenizer?

    python scripts/bench/real_model.py                 # 2 nodes x 30 rounds; run it again to go on after it was killed
    python scripts/bench/real_model.py --rounds 2      # how long a round takes here

SmolLM2-135M-Instruct (`smollm2.py` makes its folder) is trained in full, float32, by two `sapo-node start` processes
that share their groups over loopback; one CPU thread each, no public peers. It can hardly calculate, so the tasks are
the easiest of ReasoningGYM, and a chat template with a few worked examples shows the form of an answer: the model
starts with some right answers instead of none. Held-out questions are asked before and after.

This is a check that the whole program works on a real model, not a measurement of sharing: one run, without a control.
The weights stay in the cache folder.
"""

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import click
import yaml
from smollm2 import CACHE, model_folder

from sapo_node.datadir import DataDir
from sapo_node.identity import Identity
from sapo_node.monitor import history
from sapo_node.monitor.metrics import EvalRecord, Record, RoundRecord
from sapo_node.workers import die_with_parent

REPOSITORY: Final = Path(__file__).resolve().parent.parent.parent
RESULTS: Final = REPOSITORY / "docs" / "benchmarks" / "real_model"
NODES: Final = 2
END_SECONDS: Final = 180.0  # for the checkpoint of a node that was asked to stop

EXAMPLES: Final = (
    ("What is 4 + 3?", "4 + 3 = <answer>7</answer>"),
    ("Compute 9 - 4.", "9 - 4 = <answer>5</answer>"),
    ("Solve 6 + 8.", "6 + 8 = <answer>14</answer>"),
)
"""Turns before every question. The model knows sums best as whole equations: so it starts with about one answer in five
right, and with none where it is to give the number alone."""

TASKS: Final = (
    {
        "name": "basic_arithmetic",
        "config": {
            "min_terms": 2,
            "max_terms": 2,
            "min_digits": 1,
            "max_digits": 1,
            "operators": ["+", "-"],
            "allow_parentheses": False,
            "allow_negation": False,
            "format_style": "natural",
        },
    },
)
SETTINGS: Final[dict[str, Any]] = {
    "node": {"threads": 1, "drain_seconds": 600.0},  # the last evaluation has to fit into half of it
    "tasks": {"mixture": list(TASKS), "eval_every": 0},
    "inference": {"engine": "transformers", "max_prompt_tokens": 192, "max_completion_tokens": 24},
    "rollouts": {"completions_per_task": 8},
    "training": {
        "local_groups": 4,
        "external_groups": 4,
        "lr": 5e-6,
        "micro_batch_tokens": 1024,
        "checkpoint_every": 5,
        "keep_checkpoints": 1,
        "licence": "apache-2.0",
    },
    "swarm": {"name": "real-model", "nat_port_map": False, "public_peers": False, "rendezvous": False},
}


class Place(NamedTuple):
    """One node on the disk."""

    name: str
    config: Path
    data: Path


@click.command()
@click.option("--rounds", default=30, show_default=True, help="Rounds of each node, those before a restart included.")
@click.option("--questions", default=64, show_default=True, help="Held-out questions, before and after.")
@click.option("--samples", default=4, show_default=True, help="Completions of each.")
@click.option("--minutes", default=240.0, show_default=True, help="Stop after this long; run it again to go on.")
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, show_default=True)
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Where the nodes live. [default: in the cache]")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True, help="Where CSV files go.")
def main(
    rounds: int, questions: int, samples: int, minutes: float, cache: Path, folder: Path | None, out: Path
) -> None:
    """Run the nodes, write rounds.csv and evals.csv, print a paragraph."""
    model = with_examples(model_folder(cache), cache / "SmolLM2-135M-Instruct-examples")
    places = prepare(folder or cache / "real_model", model, rounds, questions, samples)
    ended = run(places, minutes)
    records = {place.name: newest(history.read(place.data / history.FILE_NAME)) for place in places}
    write(out, records)
    click.echo(paragraph(records))
    if not ended:
        raise click.ClickException("the run is not over; the same command goes on from the checkpoints")


# ---- before ----------------------------------------------------------------------------------------------------------


def with_examples(model: Path, folder: Path) -> Path:
    """The same model with worked examples in its chat template; the weights are a link."""
    folder.mkdir(exist_ok=True)
    for file in model.iterdir():
        if file.name != "chat_template.jinja" and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(template(EXAMPLES))
    return folder


def template(examples: Sequence[tuple[str, str]]) -> str:
    """A chat template in SmolLM2's form that begins with worked examples, and without its system prompt."""
    turns = "".join(
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        for question, answer in examples
    )
    return turns + (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'"
        " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def prepare(folder: Path, model: Path, rounds: int, questions: int, samples: int) -> list[Place]:
    """Settings and keys of the nodes; what an earlier run left there is gone on with."""
    folder.mkdir(parents=True, exist_ok=True)
    places = [Place(name, folder / f"{name}.yaml", folder / name) for name in ("node-1", "node-2")]
    ports, keys = free_ports(len(places)), []
    for place in places:
        data = DataDir(place.data)
        data.prepare()
        keys.append(Identity.load_or_create(data.key).peer_id)
    for number, place in enumerate(places):
        other = 1 - number
        chosen = {
            **SETTINGS,
            "node": SETTINGS["node"] | {"data_dir": str(place.data), "max_rounds": rounds, "seed": number},
            "tasks": SETTINGS["tasks"] | {"eval_questions": questions, "eval_samples": samples},
            "training": SETTINGS["training"] | {"model": str(model)},
            "swarm": SETTINGS["swarm"]
            | {
                "listen": [f"/ip4/127.0.0.1/tcp/{ports[number]}"],
                "initial_peers": [f"/ip4/127.0.0.1/tcp/{ports[other]}/p2p/{keys[other]}"],
            },
        }
        place.config.write_text(yaml.safe_dump(chosen, sort_keys=False))
    return places


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


# ---- during ----------------------------------------------------------------------------------------------------------


def run(places: Sequence[Place], minutes: float) -> bool:
    """Run the nodes until all have taken their rounds (True), or the time is over (False). Raises ClickException."""
    parent, started = os.getpid(), time.monotonic()
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for place in places:
            with place.data.with_suffix(".log").open("ab") as log:
                running[place.name] = subprocess.Popen(
                    [sys.executable, "-m", "sapo_node", "start", "--config", str(place.config)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                    preexec_fn=lambda: die_with_parent(parent),
                )
        told = -1
        while any(process.poll() is None for process in running.values()):
            if any(process.poll() for process in running.values()):
                break
            if time.monotonic() - started > 60 * minutes:
                break
            taken = min(len(history.rounds(newest(history.read(p.data / history.FILE_NAME)))) for p in places)
            if taken != told:
                click.echo(f"{time.monotonic() - started:6.0f} s: {taken} rounds by both", err=True)
                told = taken
            time.sleep(2)
    finally:
        stop(running.values())
    for place in places:
        if running[place.name].returncode:
            log = place.data.with_suffix(".log")
            last = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
            raise click.ClickException(f"{place.name} ended with {running[place.name].returncode}; {log}:\n{last}")
    return time.monotonic() - started <= 60 * minutes


def stop(processes: Iterable["subprocess.Popen[bytes]"]) -> None:
    """Let nodes that still run write their checkpoints; kill those that do not end."""
    still = [process for process in processes if process.poll() is None]
    for process in still:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + END_SECONDS
    for process in still:
        try:
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- after -----------------------------------------------------------------------------------------------------------


def newest(records: Iterable[Record]) -> list[Record]:
    """Of rounds that were taken twice, after a kill, the last; the first and the last evaluation of every round."""
    kept: dict[tuple[str, int], Record] = {}
    for record in records:
        if isinstance(record, RoundRecord):
            kept["round", record.round] = record
        elif isinstance(record, EvalRecord):
            kept.setdefault(("eval", record.round), record)  # a resumed node asks the same again
    return sorted(kept.values(), key=lambda record: record.round)


def write(out: Path, records: dict[str, list[Record]]) -> None:
    """rounds.csv and evals.csv."""
    out.mkdir(parents=True, exist_ok=True)
    names = ("round", "reward_first_drawn", "local_groups", "external_groups", "informative_groups", "grad_norm")
    names += ("tokens_sampled", "sample_seconds", "step_seconds", "round_seconds")
    with (out / "rounds.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["node", *names])
        for node, own in records.items():
            for one in history.rounds(own):
                table.writerow([node, *(shown(getattr(one, name)) for name in names)])
    with (out / "evals.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["node", "round", "pass_at_1", "questions", "samples", "right"])
        for node, own in records.items():
            for ev in history.evals(own):
                right = " ".join(f"{one.score:g}" for one in ev.per_question)
                table.writerow([node, ev.round, shown(ev.mean), ev.questions, ev.samples, right])


def shown(value: float | None) -> str:
    """Four digits are more than is known."""
    return "" if value is None else f"{value:.4g}"


def paragraph(records: dict[str, list[Record]]) -> str:
    """What came of it, in words."""
    rounds = [one for own in records.values() for one in history.rounds(own)]
    if not rounds:
        return "No round was taken."
    seconds = [one.round_seconds for one in rounds if one.round_seconds is not None]
    external, local = (sum(getattr(one, f"{origin}_groups") for one in rounds) for origin in ("external", "local"))
    taken = min(len(history.rounds(own)) for own in records.values())
    text = (
        f"SmolLM2-135M-Instruct, {len(records)} nodes, {taken} rounds each, learning rate "
        f"{SETTINGS['training']['lr']:g}: a round took {median(seconds):.0f} s (median) with one CPU thread a node; "
        f"{external / max(1, external + local):.0%} of the groups trained on came from the other node."
    )
    pairs = [evals for own in records.values() if len(evals := history.evals(own)) > 1]
    if not pairs:
        return text + " Held-out questions were not asked twice yet."
    before, after = (fmean(evals[place].mean for evals in pairs) for place in (0, -1))
    each = ", ".join(f"{evals[0].mean:.3f} to {evals[-1].mean:.3f}" for evals in pairs)
    return text + (
        f" Held-out pass@1 ({pairs[0][0].questions} questions x {pairs[0][0].samples}) went from {before:.3f} to "
        f"{after:.3f} on average ({each}). One run without a control: it shows that the program works on a real model, "
        "not what sharing is worth."
    )


if __name__ == "__main__":
    main()
