"""Settings: where they come from, how their errors read, and the files that we ship."""
# ruff: noqa: E501  (a message is easier to read whole)

import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from sapo_node import config_load, config_yaml
from sapo_node.config import NodeConfig
from sapo_node.config_load import Loaded, data_dir_of, load
from sapo_node.config_training import WIDE
from sapo_node.errors import ConfigError

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def given(text: str | bytes, env: dict[str, str] | None = None, sets: Sequence[str] = ()) -> Loaded:
    path = Path("node.yaml")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(path, env or {}, sets)


def problems(text: str | bytes, env: dict[str, str] | None = None, sets: Sequence[str] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        given(text, env, sets)
    assert caught.value.exit_code == 2
    return caught.value.problems


# ---- where values come from


def test_precedence() -> None:
    file = "training: {lr: 1e-3, local_groups: 5, external_groups: 6}\n"
    loaded = given(
        file,
        {"SAPO_NODE_TRAINING__LR": "2e-3", "SAPO_NODE_TRAINING__LOCAL_GROUPS": "7"},
        ["training.lr=3e-3", "training.lr=4e-3"],
    )
    training = loaded.config.training
    assert (training.lr, training.local_groups, training.external_groups) == (4e-3, 7, 6)


def test_origins() -> None:
    loaded = given(
        "# a comment\ntraining:\n  lr: 1e-3\ntasks:\n  mixture:\n    - name: bf\n",
        {"SAPO_NODE_SWARM__NAME": "here"},
        ["node.seed=3"],
    )
    places = {
        name: loaded.origin(name)
        for name in ("training.lr", "tasks.mixture", "swarm.name", "node.seed", "node.threads")
    }
    assert {name: (origin.kind, origin.place) for name, origin in places.items()} == {
        "training.lr": ("file", "node.yaml:3"),
        "tasks.mixture": ("file", "node.yaml:5"),
        "swarm.name": ("environment", "SAPO_NODE_SWARM__NAME"),
        "node.seed": ("--set", "--set node.seed"),
        "node.threads": ("default", "default"),
    }


def test_a_mapping_given_to_a_section_is_merged() -> None:
    loaded = given("training: {lr: 1e-3}\n", {}, ["training={local_groups: 2}"])
    assert (loaded.config.training.lr, loaded.config.training.local_groups) == (1e-3, 2)
    assert loaded.origin("training.lr").place == "node.yaml:1"
    assert loaded.origin("training.local_groups").place == "--set training"


@pytest.mark.parametrize(
    ("text", "wide"),
    [
        ("", True),
        ("training: {model: benchmark}", True),
        ("training: {model: ./a-folder}", False),
        ("training: {model: ./a-folder, recipe: wide}", True),
        ("training: {recipe: paper}", False),
        ("swarm: {enabled: false}", False),
    ],
)
def test_the_embedded_models_in_a_swarm_follow_the_rule_that_was_best_for_them(text: str, wide: bool) -> None:
    loaded = given(text)
    paper = given("training: {recipe: paper}").config.dump()
    for section, values in WIDE.items():
        for name, value in values.items():
            expected = value if wide else paper[section][name]
            assert loaded.config.dump()[section][name] == expected != (paper[section][name] if wide else value)
            assert loaded.origin(f"{section}.{name}").place == ("training.recipe: wide" if wide else "default")
    assert given(json.dumps(loaded.config.dump())).config == loaded.config, "what is shown can be read back"


def test_what_is_given_wins_over_a_recipe() -> None:
    loaded = given(
        "training: {recipe: wide, strategy: uniform}",
        {"SAPO_NODE_ROLLOUTS__MAX_EXTERNAL_USES": "1"},
        ["training.external_groups=3"],
    )
    training = loaded.config.training
    assert (training.strategy, training.external_groups, training.rule) == ("uniform", 3, "capped")
    assert loaded.config.rollouts.max_external_uses == 1
    assert loaded.origin("training.external_groups").place == "--set training.external_groups"


def test_a_recipe_asks_for_no_reference_model_that_devices_have_no_place_for() -> None:
    assert given("training: {devices: 2}").config.training.kl_coef == 0
    (problem,) = problems("training: {devices: 2, kl_coef: 0.1}")
    assert "no place for the reference model" in problem


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "training:\n  # lr: 3\n", "training:\nnode: ~\n"])
def test_an_empty_file_or_section_means_the_defaults(text: str) -> None:
    assert given(text).config.training == NodeConfig().training


def test_no_file_means_the_defaults(tmp_path: Path) -> None:
    assert load(None, {}).config.node.data_dir == tmp_path / "sapo-data"


def test_numbers_and_switches_mean_what_people_write() -> None:
    """Under YAML 1.1, 3e-4 is a text, `on` is true, 010 is eight and 1:30 is ninety."""
    loaded = given(
        "training: {lr: 3e-4}\nswarm: {push: on, name: 1:30}\nnode: {seed: 010}\nrollouts: {max_groups: 30_000}\n".replace(
            "1:30", "'1-30'"
        )
    )
    config = loaded.config
    assert (config.training.lr, config.swarm.push, config.node.seed, config.rollouts.max_groups) == (
        3e-4,
        "on",
        10,
        30_000,
    )
    assert given("", {"SAPO_NODE_TRAINING__LR": "3e-4"}).config.training.lr == 3e-4
    assert config_yaml.parse("1:30").data == "1:30"
    assert config_yaml.parse("[.5, 1., -2E+3, .inf, 0x1F, ~, True]").data == [
        0.5,
        1.0,
        -2000.0,
        math.inf,
        31,
        None,
        True,
    ]


def test_relative_paths_start_at_the_files_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.yaml").write_text(
        "node: {data_dir: d}\ntraining: {model: ./m}\ntasks: {mixture: [{source: dataset, name: x, path: q.jsonl}]}\n"
    )
    config = load(Path("sub/a.yaml"), {}).config
    assert config.node.data_dir == tmp_path / "sub" / "d"
    assert config.training.model == str(tmp_path / "sub" / "m")
    assert config.tasks.mixture[0].path == tmp_path / "sub" / "q.jsonl"
    assert load(Path("sub/a.yaml"), {}, ["node.data_dir=/abs"]).config.node.data_dir == Path("/abs")
    assert load(Path("sub/a.yaml"), {}, ["training.model=org/name"]).config.training.model == "org/name"


def test_data_dir_alone_agrees_with_load(tmp_path: Path) -> None:
    assert Path(config_load.DEFAULT_DATA_DIR) == NodeConfig().node.data_dir
    Path("node.yaml").write_text("node: {data_dir: d}\ntraining: {lrr: 1}\n")  # wrong elsewhere: not its concern
    assert data_dir_of(Path("node.yaml"), {}) == tmp_path / "d"
    assert data_dir_of(Path("node.yaml"), {"SAPO_NODE_NODE__DATA_DIR": "e"}) == tmp_path / "e"
    assert data_dir_of(None, {}) == tmp_path / "sapo-data"
    Path("node.yaml").write_text("node: {data_dir: [1]}\n")
    with pytest.raises(ConfigError, match=r"^node\.yaml:1:18: node\.data_dir: must be a path$"):
        data_dir_of(Path("node.yaml"), {})
    Path("node.yaml").write_text("node: 5\n")
    with pytest.raises(ConfigError, match=r"^node\.yaml:1:7: node: must be a section"):
        data_dir_of(Path("node.yaml"), {})


# ---- errors


def test_a_misspelt_setting_in_each_place() -> None:
    text = "training:\n    lrr: 1\n"
    assert problems(text) == [
        "node.yaml:2:5: training.lrr: unknown setting; did you mean 'lr'?",
        "node.yaml:2:10: training.lr: must be less than 1, not 1",
    ]
    assert problems("", {"SAPO_NODE_TRAINING__LRR": "0.1"}) == [
        "SAPO_NODE_TRAINING__LRR: unknown setting; did you mean SAPO_NODE_TRAINING__LR?"
    ]
    assert problems("", {}, ["training.lrr=0.1"]) == [
        "--set training.lrr: unknown setting; did you mean 'training.lr'?"
    ]


def test_every_error_at_once_in_the_order_of_the_file() -> None:
    text = """\
training:
  rule: papr
  local_groups: four
  betas: [0.9]
trainig: {}
rollouts:
  shared_per_round: 3.5
tasks:
  mixture:
    - nme: bf
    - name: 12
      weight: 0
"""
    found = problems(text, {"SAPO_NODE_NODE__THREADS": "-1", "SAPO_NODE_FOO": "1"}, ["swarm.max_fetches=65", "seed"])
    assert found == [
        "node.yaml:2:9: training.rule: must be 'paper' or 'capped', not 'papr'; did you mean 'paper'?",
        "node.yaml:3:17: training.local_groups: must be a whole number, not 'four'",
        "node.yaml:4:10: training.betas: has too few values",
        "node.yaml:5:1: trainig: unknown setting; did you mean 'training'?",
        "node.yaml:7:21: rollouts.shared_per_round: must be a whole number, not 3.5",
        "node.yaml:10:7: tasks.mixture.0.nme: unknown setting; did you mean 'name'?",
        "node.yaml:11:13: tasks.mixture.1.name: must be a text, not 12; put it in quotes",
        "node.yaml:12:15: tasks.mixture.1.weight: must be greater than 0, not 0",
        "SAPO_NODE_FOO: unknown setting",
        "SAPO_NODE_NODE__THREADS: must be 0 or more, not -1",
        "--set seed: has no value; write it as --set training.lr=3e-4",
        "--set swarm.max_fetches: must be 64 or less, not 65",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr: 1\n", "node.yaml:1:1: lr: unknown setting; did you mean 'training.lr'?"),
        ("training: {max_groups: 100}\n", "node.yaml:1:12: training.max_groups: unknown setting; did you mean 'rollouts.max_groups'?"),
        ("training: {lr: '1e-3'}\n", "node.yaml:1:16: training.lr: must be a number, not '1e-3'; leave out the quotes"),
        ("training: {lr: .nan}\n", "node.yaml:1:16: training.lr: must be less than 1, not NaN"),
        ("training: {lr: [1]}\n", "node.yaml:1:16: training.lr: must be a number, not a list"),
        ("training: {rule: }\n", "node.yaml:1:17: training.rule: must be 'paper' or 'capped', not empty"),
        ("training: [1]\n", "node.yaml:1:11: training: must be settings (name: value), not a list"),
        ("node: {drain_seconds: .inf}\n", "node.yaml:1:23: node.drain_seconds: must be a finite number"),
        ("node: {data_dir: 5}\n", "node.yaml:1:18: node.data_dir: must be a text, not 5; put it in quotes"),
        ("swarm: {enabled: 1}\n", "node.yaml:1:18: swarm.enabled: must be true or false, not 1"),
        ("swarm: {listen: /ip4}\n", "node.yaml:1:17: swarm.listen: must be a list, not '/ip4'"),
        ("swarm: {name: ''}\n", "node.yaml:1:15: swarm.name: must have 1 or more characters"),
        ("swarm: {name: a/b}\n", "node.yaml:1:15: swarm.name: 'a/b' does not match ^[A-Za-z0-9][A-Za-z0-9._-]*$"),
        ("tasks: {mixture: []}\n", "node.yaml:1:18: tasks.mixture: must have 1 or more entries"),
        ("tasks: {mixture: [{weight: 1}]}\n", "node.yaml:1:19: tasks.mixture.0.name: is missing"),
        (
            "tasks: {mixture: [{name: bf, config: {a: {b: 1}}}]}\n",
            "node.yaml:1:42: tasks.mixture.0.config.a: must be a number, a text, true or false, or a list of those, "
            "not a section of settings",
        ),
        ("- 1\n", "node.yaml:1:1: must hold settings like `training:`, not one value"),
        ("node: {1: 2}\n", "node.yaml:1:8: node.1: unknown setting"),
        ("node: {[1]: 2}\n", "node.yaml:1:8: node: a setting's name must be plain text"),
        ("node:\n  seed: 1\n  threads: 2\n  seed: 3\n", "node.yaml:4:3: node.seed: set twice; first in line 2"),
        ("node: !!python/name:os.system {}\n", "node.yaml:1:7: node: the tag 'tag:yaml.org,2002:python/name:os.system' is not supported here"),
        ("node: {data_dir: \"a\\0b\"}\n", "node.yaml:1:18: node.data_dir: this text holds the character NUL, which no setting can"),
    ],
)  # fmt: skip
def test_one_wrong_value(text: str, expected: str) -> None:
    assert expected in problems(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node:\n\tseed: 1\n", "node.yaml:2:1: not valid YAML: a tab where spaces are expected; indent with spaces"),
        ("node: [1, 2\ntraining: {}\n", "node.yaml:2:9: not valid YAML: "),
        ("node: {seed: 1}}\n", "node.yaml:1:16: not valid YAML: "),
        ("a: *b\n", "node.yaml:1:4: not valid YAML: found undefined alias 'b'"),
        ("a: 1\n---\nb: 1\n", "node.yaml:2:1: not valid YAML: but found another document"),
        ("node: 'x\x01'\n", "node.yaml:1:9: not valid YAML: the character U+0001 is not allowed"),
        ("[" * 50, "node.yaml:1:21: not valid YAML: nested deeper than 20"),
        ("a: &a [*a]\n", "node.yaml:1:4: too many values, or an alias inside its own anchor"),
    ],
)
def test_what_is_not_yaml(text: str, expected: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith(expected)


def test_aliases_work_but_cannot_explode() -> None:
    text = "tasks:\n  mixture:\n    - {name: chain_sum, config: &c {min_terms: 2}}\n    - {name: basic_arithmetic, config: *c}\n"
    assert given(text).config.tasks.mixture[1].config == {"min_terms": 2}
    laughs = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
    assert "too many values" in problems(laughs)[0]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def message(path: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(Path(path), {})
        return str(caught.value)

    assert message("nowhere.yaml") == "nowhere.yaml: there is no such file; `sapo-node init` writes one"
    (tmp_path / "folder").mkdir()
    assert message("folder") == "folder: is a directory; name the YAML file in it"
    (tmp_path / "big.yaml").write_bytes(b"#" * (2 << 20))
    assert message("big.yaml") == "big.yaml: is larger than 1 MiB, so it is no file of settings"
    assert problems(b"node:\n  seed: \xff\n") == ["node.yaml:2:9: byte 0xff is not UTF-8; save the file as UTF-8"]
    assert given(b"\xef\xbb\xbfnode: {seed: 1}\n").config.node.seed == 1


@pytest.mark.parametrize(
    ("text", "sets", "expected"),
    [
        (
            "training: {local_groups: 0, external_groups: 0}\n",
            [],
            "node.yaml:1:26: training: local_groups + external_groups (I + J) must be > 0, or there is nothing to train on",
        ),
        (
            "rollouts:\n  shared_per_round: 9\n",
            [],
            "node.yaml:2:21: rollouts.shared_per_round (S = 9) exceeds the tasks drawn a round (B = 4); only what was "
            "drawn can be shared",
        ),
        (
            "training: {local_groups: 6}\n",
            ["rollouts.tasks_per_round=5"],
            "--set rollouts.tasks_per_round: rollouts.tasks_per_round (B = 5) is below training.local_groups (I = 6); a "
            "round trains on I of the B groups it drew",
        ),
        (
            "swarm: {enabled: false, initial_peers: [/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGRUR1kPgVnPoKGdWeM3Wn6LsRwtjD3f4YNYLqkXbVqTA]}\n",
            [],
            "node.yaml:1:40: swarm.initial_peers is set but swarm.enabled is false; remove one of the two",
        ),
        (
            "tasks: {mixture: [{name: x, source: dataset}]}\n",
            [],
            "node.yaml:1:19: tasks.mixture.0: a data set needs 'path', the JSONL file with its rows",
        ),
    ],
)
def test_rules_between_settings(text: str, sets: list[str], expected: str) -> None:
    assert problems(text, {}, sets) == [expected]


@pytest.mark.parametrize(
    ("env", "sets", "expected"),
    [
        ({"SAPO_NODE_TRAINING__lr": "1"}, [], "SAPO_NODE_TRAINING__lr: unknown setting; names are in capitals: SAPO_NODE_TRAINING__LR"),
        ({"SAPO_NODE_": "1"}, [], "SAPO_NODE_: unknown setting"),
        ({"SAPO_NODE_TRAINING__LR": "[1"}, [], "SAPO_NODE_TRAINING__LR: not valid YAML: "),
        ({"SAPO_NODE_TRAINING__LR__X": "1"}, [], "SAPO_NODE_TRAINING__LR__X: training.lr: must be a number, not a section of settings"),
        ({}, ["tasks.mixture.0.name=bf"], "--set tasks.mixture.0.name: 'tasks.mixture' is a list, which can only be set as a whole"),
        (
            {},
            ["swarm.initial_peers=[/ip4/127.0.0.1/tcp/1/p2p/12D3KooWgarbage]"],
            "--set swarm.initial_peers: entry 1: has the peer id 12D3KooWgarbage at its end, which is not valid; copy the "
            "whole address again",
        ),
        (
            {},
            ["swarm.initial_peers=[/dnsaddr/a, /ip4/127.0.0.1/tcp/1]"],
            "--set swarm.initial_peers: entry 2: must end with /p2p/ and the peer id; the other node prints its full "
            "addresses when it starts",
        ),
        ({}, ["swarm.announce=[\"/dns4/a\\eb/tcp/1\"]"], "--set swarm.announce: entry 1: is no multiaddr; one looks like "
         "/ip4/203.0.113.7/tcp/4001"),
        ({}, ["=3"], "--set : unknown setting"),
        ({}, ["training={rule: x}"], "--set training: training.rule: must be 'paper' or 'capped', not 'x'"),
        ({}, ["training={lr: 1, lr: 2}"], "--set training: set twice; first in line 1"),
    ],
)  # fmt: skip
def test_wrong_overrides(env: dict[str, str], sets: list[str], expected: str) -> None:
    found = problems("tasks: {mixture: [{name: bf}]}\n", env, sets)
    assert any(problem.startswith(expected) for problem in found), found


def test_other_variables_are_not_ours() -> None:
    given("", {"SAPO_WORKER_FD": "3", "_SAPO_NODE_COMPLETE": "bash_source", "PATH": "/bin"})


# ---- files we ship


@pytest.mark.parametrize("name", ["demo", "node", "silo", "paper"])
def test_shipped_configs_are_valid(name: str) -> None:
    load(ROOT / "configs" / f"{name}.yaml", {})


def test_every_commented_setting_of_node_yaml_shows_the_default(tmp_path: Path) -> None:
    text = (ROOT / "configs" / "node.yaml").read_text().replace("# recipe: auto", "recipe: paper")
    open_text, count = re.subn(r"^(  +)# ([a-z_]+: .*)$", r"\1\2", text, flags=re.MULTILINE)
    assert count > 30
    assert given(open_text).config == given(text).config
    shown = {(path[0], path[1]) for path in config_yaml.parse(open_text).values if len(path) == 2}
    defaults = given("training: {recipe: paper}").config.dump()
    # A new user's choices, not defaults.
    chosen = {("tasks", "mixture")} | {("training", name) for name in ("licence", "recipe", "rule")}
    for section, name in shown - chosen:
        assert given(open_text).config.dump()[section][name] == defaults[section][name], f"{section}.{name}"


def test_the_wheels_template_is_the_config_we_show() -> None:
    template = ROOT / "sapo_node" / "templates" / "node.yaml"
    assert template.read_bytes() == (ROOT / "configs" / "node.yaml").read_bytes(), "copy configs/node.yaml there"


def test_paper_yaml_holds_the_published_setting() -> None:
    config = load(ROOT / "configs" / "paper.yaml", {}).config
    training = config.training
    assert (training.local_groups, training.external_groups, training.lr, training.rule) == (4, 4, 1e-3, "paper")
    assert config.rollouts.completions_per_task == 8
    assert not training.mask_truncated
    assert len({entry.name for entry in config.tasks.mixture}) == 9


def test_configuration_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make_config_docs.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
