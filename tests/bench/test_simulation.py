"""The swarm in one process: that arms are paired, that groups cross it, and that results come back as they were."""

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import click
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts" / "bench"))

from csv_files import append, drop, row, typed
from jobs import in_processes
from sapo import finished
from simulation import processes, propagation
from simulation.arms import ARMS, REPOSITORY, SECOND_BASE, Arm, mix
from simulation.poison import Kind
from simulation.report import begun_elsewhere, by_arm, by_base, claims, comparison, costs, equal_cost, ratio, read
from simulation.stages import BASES, OTHERS, STAGES, TASK, TEACHERS, WINNER, Claim
from simulation.stats import interval
from simulation.swarm import Point, Run, Weights, execute, swarm

from sapo_node.config import NodeConfig
from sapo_node.config_training import WIDE
from sapo_node.training.base import TrainCompletion, TrainGroup
from sapo_node.training.sapo import informative

pytestmark = pytest.mark.slow

EMBEDDED = REPOSITORY / "sapo_node" / "assets" / "benchmark"


def small(name: str, nodes: int = 2, **changes: Any) -> Arm:
    return replace(ARMS[name], nodes=nodes, **changes)


async def questions(arm: Arm, seed: int, rounds: int = 2) -> list[list[bytes]]:
    """Hashes of the questions that each node drew, round after round."""
    found: list[list[bytes]] = []
    async with swarm(arm, EMBEDDED, seed, 3e-4) as (made, _, _):
        for number in range(rounds):
            await made.round(number)
            for node in made.nodes:
                rows = await node.pool._reader.ask(  # what no candidate shows: groups that were used
                    lambda db: db.execute(
                        "SELECT question_sha256 FROM groups WHERE origin = 'local' ORDER BY id"
                    ).fetchall()
                )
                found.append([digest for (digest,) in rows])
    return found


def test_arms_of_one_seed_ask_the_same_questions_whatever_they_do_with_them() -> None:
    eight = asyncio.run(questions(small("8/0"), 0))
    four = asyncio.run(questions(small("4/4"), 0))
    assert [asked[:4] for asked in eight[:2]] == [asked[:4] for asked in four[:2]]  # both nodes, first round
    assert [asked[8:12] for asked in eight[2:]] == [asked[4:8] for asked in four[2:]]  # second round
    assert asyncio.run(questions(small("4/4"), 1)) != four


def test_a_run_can_be_repeated_to_the_last_digit_and_groups_cross_the_swarm() -> None:
    run = Run("test", "4/4", "benchmark", 0, 1e-3, 3)

    def once() -> list[Point]:
        return asyncio.run(execute(run, small("4/4", nodes=4), EMBEDDED, lambda number: None))

    first, second = once(), once()
    for one, other in zip(first, second, strict=True):
        assert (one.held_out, one.reward_first, one.tokens, one.last) == (
            other.held_out,
            other.reward_first,
            other.tokens,
            other.last,
        )
    assert first[-1].external > 0
    assert first[-1].completions == 4 * 3 * 4 * 8  # nodes x rounds x I x L


def test_own_past_groups_come_back_and_no_others() -> None:
    async def producers() -> set[str]:
        found: set[str] = set()
        async with swarm(small("4/4", own_past=True), EMBEDDED, 0, 3e-4) as (made, _, _):
            for number in range(6):
                await made.round(number)
                for node in made.nodes:
                    found |= {one.producer for one in await node.pool.external_candidates(made._clock(), idle=True)}
        return found

    assert asyncio.run(producers()) == {"own past"}


def write(file: Path, run: Run, points: list[Point], weights: str = "aaaa1111") -> None:
    append(file, [row(run, point, Weights(weights)) for point in points])


def points(scale: float, last: bool = True) -> list[Point]:
    rest = {"held_out_any": 0.0, "lowest": 0.0, "highest": 0.0, "reward_first": 0.0, "reward_after": 0.0}
    more = rest | {"informative": 0.0, "external": 0.0, "tokens": 0}
    return [
        Point(
            round=at,
            held_out=scale * at,
            completions=at,
            seconds=at,
            last=scale * at if last and at else None,
            last_any=0.5 if last and at else None,
            **more,  # type: ignore[arg-type]
        )
        for at in (0, 20)
    ]


def test_results_come_back_from_their_file_and_unfinished_runs_do_not(tmp_path: Path) -> None:
    file = tmp_path / "test.csv"
    for seed in (0, 1):
        write(file, Run("test", "a", "base", seed, 1e-4, 20), points(0.02))
        write(file, Run("test", "b", "base", seed, 1e-4, 20), points(0.01))
    write(file, Run("test", "b", "base", 2, 1e-4, 20), points(0.01, last=False))
    assert len(finished(file)) == 4
    results = read(file)
    assert len(results) == 4
    arms = by_arm(results)
    found = ratio(arms["a"], arms["b"])
    assert found is not None
    assert found.estimate == pytest.approx(2.0)
    assert "| a | 2 | 0.200 |" in comparison(results, ["b"])
    assert "| a | 2 of 2, 5, 5, 5 | 2 of 2, 10, 10, 10 | 2 of 2, 15, 15, 15 |" in costs(results)
    assert "| b | 2 of 2, 10, 10, 10 | 2 of 2, 20, 20, 20 | 0 of 2 |" in costs(results)
    told = claims(results, [Claim("a", "b", "more", 1.1), Claim("b", "a", "less", 1.0), Claim("c", "a", "new", 1.0)])
    assert [line.split(" | ")[3] for line in told.splitlines()[2:]] == ["reached", "**not reached**", "not run yet"]
    assert told.splitlines()[2].endswith("| 2.00 | 2.00 |")
    assert "| a over b | 2.00 (2.00 to 2.00; 2 of 2 ahead) |" in equal_cost(results, [("a", "b")])


def test_what_a_base_lets_expect_stands_beside_what_became_of_it(tmp_path: Path) -> None:
    file, starts = tmp_path / "dose.csv", tmp_path / "start.csv"
    for base, right, groups in (("strong", 0.5, 7.0), ("weak", 0.01, 1.0)):
        for arm, scale in (("8/0", 0.01), ("4/4", 0.02)):
            for seed in (0, 1):
                write(file, Run("dose", arm, base, seed, 3e-4, 20), points(scale))
            still = [
                replace(one, reward_first=right, informative=groups * (1 if arm == "8/0" else 1.5))
                for one in points(0.0)
            ]
            write(starts, Run("start", arm, base, 0, 0.0, 20), still)
    weak, strong = by_base(read(file), read(starts)).splitlines()[2:]
    assert weak == "| weak | 0.010 | 0.100 | 0.200 | 2.00 (2.00 to 2.00; 2 of 2 ahead) | 1.0, 1.5 | 1.50 | 4.00 |"
    assert strong.startswith("| strong | 0.500 |")
    assert strong.endswith("| 7.0, 10.5 | 1.50 | 1.00 |")


def test_arms_are_compared_on_the_same_weights_only(tmp_path: Path) -> None:
    """Machines of another kind make another base from the same seed: a better one would pass for a better arm."""
    file = tmp_path / "test.csv"
    runs = [Run("test", arm, "base", seed, 1e-4, 20) for seed in range(2) for arm in "ab"]
    for run in runs[:3]:  # seed 0 whole, seed 1 begun
        write(file, run, points(0.01), "11110000")
    here = {"base": Weights("22220000")}
    assert [one.run for one in begun_elsewhere(read(file), runs, here)] == [runs[2]]
    assert begun_elsewhere(read(file), runs, {"base": Weights("11110000")}) == []
    write(file, runs[3], points(0.02), here["base"].weights)
    assert [one.run for one in begun_elsewhere(read(file), runs, here)] == [runs[2]], "it has no pair"
    arms = by_arm(read(file))
    assert ratio(arms["b"], arms["a"]) is None, "nor is there a second pair for an interval"
    assert drop(file, lambda line: typed(line, Run) == runs[2]) == 2
    write(file, runs[2], points(0.01), here["base"].weights)
    arms = by_arm(read(file))
    found = ratio(arms["b"], arms["a"])
    assert found is not None
    assert found.pairs == 2
    assert begun_elsewhere(read(file), runs, here) == [], "seed 0 is whole"
    assert set(finished(file)) == set(runs)


def test_a_base_is_known_by_its_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert Weights.of(tmp_path) == Weights("9a129038")


def test_every_arm_has_settings_that_a_node_takes() -> None:
    for arm in ARMS.values():
        config = arm.config(EMBEDDED, 1e-4)
        assert config.training.on_shortage == "fewer"
    assert Arm("x", mix(3, 5)).config(EMBEDDED, 1e-4).training.external_groups == 5


def test_the_recipe_is_the_arm_that_was_confirmed() -> None:
    measured = ARMS[WINNER].config(EMBEDDED, 1e-4).dump()
    assert NodeConfig().training.local_groups == ARMS[WINNER].training["local_groups"]
    for section, values in WIDE.items():
        assert {name: measured[section][name] for name in values} == values
        assert set(getattr(ARMS[WINNER], section)) - {"local_groups"} <= set(values)


def test_every_stage_can_be_run() -> None:
    for stage, runs in STAGES.items():
        assert len(set(runs)) == len(runs) > 0
        assert {run.stage for run in runs} == {stage}
        assert {run.arm for run in runs} <= set(ARMS)
        assert {run.base for run in runs} <= set(BASES)
    assert set(TEACHERS.values()) <= set(BASES)


@pytest.mark.parametrize("name", [name for name in OTHERS if not ARMS[name].second_base])
def test_every_other_arm_takes_rounds(name: str) -> None:
    async def groups() -> list[int]:
        arm = small(name, nodes=min(2, ARMS[name].nodes))
        async with swarm(arm, EMBEDDED, 0, 3e-4) as (made, _, _):
            await made.round(0)
            return [node.record.local_groups for node in made.nodes if node.record]

    assert asyncio.run(groups()) == [ARMS[name].training["local_groups"]] * min(2, ARMS[name].nodes)


def test_specialised_nodes_ask_what_others_do_not() -> None:
    arm = ARMS["4/4 specialised"]
    weights = [[task.weight for task in arm.config(EMBEDDED, 1e-4, node).tasks.mixture] for node in (0, 1)]
    assert weights[0][0] == weights[1][1] > 3 * weights[0][1] == 3 * weights[1][0]


def test_nodes_of_another_family_and_tokenizer_take_part(tmp_path: Path) -> None:
    (tmp_path / "base").symlink_to(EMBEDDED)
    (tmp_path / SECOND_BASE).symlink_to(REPOSITORY / "tests" / "assets" / "neox")

    async def families() -> tuple[list[str], list[float]]:
        async with swarm(small("4/4 mixed"), tmp_path / "base", 0, 1e-3) as (made, _, _):
            taken = []
            for number in range(6):
                await made.round(number)
                taken += [node.record.external_groups for node in made.nodes if node.record]
            return [node.policy.trainer.policy.model.config.model_type for node in made.nodes], taken

    kinds, taken = asyncio.run(families())
    assert kinds == ["llama", "gpt_neox"]
    assert sum(taken) > 0


def test_supervised_targets_are_others_right_answers_and_no_more() -> None:
    def group(origin: Any) -> TrainGroup:
        texts = [TrainCompletion(text=text, finish="stop") for text in ("1", "2", "3", "4")]
        rewards = [1.0, 0.0, 0.0, 1.0]
        return TrainGroup(
            group_id=1,
            origin=origin,
            producer=origin,
            question="?",
            completions=texts,
            rewards=rewards,
            policy_version=0,
        )

    async def rows() -> list[tuple[str, float, bool]]:
        async with swarm(small("4/4 supervised", nodes=1), EMBEDDED, 0, 1e-3) as (made, _, _):
            found, skipped = made.nodes[0].policy.trainer._rows([group("local"), group("external")])
            assert not skipped
            return [(row.origin, row.advantage, row.trained) for row in found]

    found = asyncio.run(rows())
    assert [(advantage, trained) for origin, advantage, trained in found if origin == "external" and trained] == [
        (1.0, True)
    ] * 2
    assert all(trained for origin, _, trained in found if origin == "local")


def test_trials_of_propagation_come_back_from_their_file(tmp_path: Path) -> None:
    file = tmp_path / "propagation.csv"
    for seed in (0, 1):
        trial = propagation.Trial("removed", TASK, seed, 3e-4, 20)
        levels = [
            propagation.Level(round=0, teacher=0.5, others=0.0, lowest=0.0, mean=0.1, seconds=0.0),
            propagation.Level(round=10, teacher=None, others=(0.1, 0.3)[seed], lowest=0.0, mean=0.1, seconds=2.5),
        ]
        append(file, [row(trial, level) for level in levels])
    found = propagation.read(file)
    assert list(found.values())[1] == levels
    assert [propagation.crossing(one) for one in found.values()] == [None, 10]
    assert "| removed, 20 rounds | 2 | never, 10 | 0.20 | 0.00 |" in propagation.table(found)


@pytest.mark.parametrize("mode", get_args(processes.Mode))
def test_an_arm_runs_as_real_processes_and_simulated_and_its_curve_comes_back(
    mode: processes.Mode, tmp_path: Path
) -> None:
    arm = replace(ARMS["4/4"], nodes=2, tasks={"eval_questions": 30})
    trial = processes.Trial("4/4", mode, "base-0", 3e-4, 1)
    found = processes.execute(trial, arm, EMBEDDED, 2)
    assert [one.round for one in found] == [0, 2]
    assert all(0.0 <= one.lowest <= one.held_out <= one.highest <= 1.0 for one in found)
    assert found[0].external == 0.0 <= found[1].external <= 4.0
    append(tmp_path / "processes.csv", [row(trial, point) for point in found])
    assert list(processes.read(tmp_path / "processes.csv")) == [trial]


def test_a_mode_is_compared_with_the_simulation_by_its_unpaired_interval() -> None:
    ends = {"simulated": (0.12, 0.14, 0.13), "waiting": (0.10, 0.11, 0.12)}
    trials = {
        processes.Trial("4/4", mode, "base-0", 3e-4, repeat): [
            processes.Measured(0, 0.0, 0.0, 0.0),
            processes.Measured(20, end, end, end, external=2.0),
        ]
        for mode, values in ends.items()
        for repeat, end in enumerate(values)
    }
    first, second = processes.table(trials).splitlines()[2:]
    assert first.startswith("| 4/4 | simulated | 3 | 2.0 | 0.000 | 0.130 |")
    assert second.endswith("| 0.055 (0.050 to 0.060) | -0.010 (-0.019 to -0.001) | 0.110 (0.100 to 0.120) | "
                           "-0.020 (-0.037 to -0.003) |")  # fmt: skip
    with pytest.raises(ValueError, match="two values"):
        interval([0.1], [0.2, 0.3])


@pytest.mark.parametrize("kind", get_args(Kind))
def test_poison_passes_verification(kind: Kind) -> None:
    async def taken() -> tuple[int, int]:
        arm = replace(ARMS["4/4"], nodes=1, poisoners=1, poison=kind)
        async with swarm(arm, EMBEDDED, 0, 3e-4) as (made, _, _):
            await made.round(0)
            candidates = await made.nodes[0].pool.external_candidates(made._clock())
            return len(candidates), sum(informative(one.rewards) for one in candidates)

    groups, usable = asyncio.run(taken())
    assert 0 < usable == groups


def test_a_run_that_fails_costs_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    kept: dict[str, float] = {}

    def ended(key: str, result: float) -> str:
        kept[key] = result
        return key

    jobs = {"a": (math.sqrt, -1.0), "b": (math.sqrt, 4.0), "c": (math.sqrt, 9.0)}
    with pytest.raises(click.ClickException, match="1 of 3 runs failed"):
        in_processes(jobs, 1, ended)
    assert kept == {"b": 2.0, "c": 3.0}
    assert "a failed: ValueError: math domain error" in capsys.readouterr().err


def test_runs_end_with_a_bench_that_is_killed(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    job = f"import os, pathlib, time; pathlib.Path({str(begun)!r}).write_text(str(os.getpid())); time.sleep(60)"
    code = f"from jobs import in_processes; in_processes({{'a': (exec, {job!r})}}, 1, lambda *_: '')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    bench = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        eventually(lambda: begun.exists() and begun.read_text())
    finally:
        bench.kill()
        bench.wait()
    eventually(lambda: not Path(f"/proc/{begun.read_text()}").exists())


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
