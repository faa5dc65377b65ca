"""The image and the compose file say what they must, as far as that shows without a Docker engine.

`scripts/smoke_compose.sh` builds and runs them for real.
"""

import json
import os
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from sapo_node import config_load
from sapo_node.cli import cli
from sapo_node.config import NodeConfig

ROOT = Path(__file__).parent.parent
ENGINES = ("vllm", "transformers")
GIB = 1 << 30


# ---- the image -------------------------------------------------------------------------------------------------------


def stages() -> list[list[tuple[str, str]]]:
    """The Dockerfile's stages, each a list of instructions with their arguments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    made: list[list[tuple[str, str]]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            made.append([])
        made[-1].append((name, arguments.strip()))
    return made


def last(name: str) -> str:
    """Arguments of the final stage's last instruction of that name."""
    return [arguments for found, arguments in stages()[-1] if found == name][-1]


def test_it_is_made_in_stages_of_one_base() -> None:
    bases = [stage[0][1].split()[0] for stage in stages()]
    assert bases == ["python:3.11-slim-bookworm", "builder", "python:3.11-slim-bookworm"]


def test_compilers_and_pip_stay_out_of_the_final_stage_on_a_cpu() -> None:
    runs = " ".join(arguments for name, arguments in stages()[-1] if name == "RUN")
    assert "pip" not in runs
    assert re.findall(r"if \[ \"\$DEVICE\" = cuda \]; then [^;]*gcc", runs)
    assert runs.count("gcc") == 1


def test_it_does_not_run_as_root() -> None:
    user = last("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)  # numbers: Kubernetes' runAsNonRoot cannot judge a name
    runs = " ".join(arguments for name, arguments in stages()[-1] if name == "RUN")
    assert f"--uid {user.split(':')[0]} " in runs


def test_its_health_is_the_nodes_readiness() -> None:
    health = last("HEALTHCHECK")
    command = json.loads(health.partition(" CMD ")[2])
    assert command == ["sapo-node", "status", "--ready"]
    assert "--ready" in CliRunner().invoke(cli, ["status", "--help"]).output
    assert int(re.findall(r"--interval=(\d+)s", health)[0]) >= 10  # each check costs a third of a second of a core


def test_signals_reach_the_node() -> None:
    """The exec form: a shell between would swallow SIGTERM, and nothing would drain."""
    assert json.loads(last("ENTRYPOINT")) == ["/usr/bin/tini", "--", "sapo-node"]
    assert json.loads(last("CMD"))[0] == "start"
    assert last("STOPSIGNAL") == "SIGTERM"


def test_data_lies_in_a_volume_of_its_user() -> None:
    (volume,) = json.loads(last("VOLUME"))
    assert f"SAPO_NODE_NODE__DATA_DIR={volume}" in last("ENV")
    runs = " ".join(arguments for name, arguments in stages()[-1] if name == "RUN")
    assert re.search(rf"install -d -o sapo -g sapo -m 0700 {volume}\b", runs)


def test_all_that_is_installed_is_pinned() -> None:
    """What is not torch (whose build differs by machine) nor our own wheel comes from a lock, with hashes."""
    runs = " ; ".join(arguments for stage in stages() for name, arguments in stage if name == "RUN")
    installs = re.findall(r"pip install ([^&;]*)", runs)
    assert len(installs) >= 5
    for arguments in map(str.split, installs):
        locked = {"--no-deps", "--require-hashes", "-r"} <= set(arguments)
        ours = "--no-deps" in arguments and arguments[-1] == "dist/*.whl"
        assert locked or ours or arguments == [f"torch=={torch_of('Dockerfile')}"]


def torch_of(file: str) -> str:
    """The version of torch that a file asks for."""
    found = re.search(r"torch=+(2[\d.]+)", (ROOT / file).read_text(), re.IGNORECASE)
    assert found, file
    return found[1]


def test_one_version_of_torch_everywhere() -> None:
    assert len({torch_of(file) for file in ("Dockerfile", "scripts/setup.sh", "scripts/lock.py")}) == 1


def test_what_it_copies_is_there_and_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        source
        for stage in stages()
        for name, arguments in stage
        if name == "COPY" and not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    ]
    assert len(copied) >= 6
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == path or source.startswith(f"{path}/") for path in allowed), source
    assert all((ROOT / path).exists() for path in allowed)


def test_neither_data_nor_keys_get_into_the_image() -> None:
    """Everything is ignored but a few names, none of which a node writes to."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert not [line for line in lines if line.startswith("!") and fnmatch("sapo-data", line[1:])]


# ---- docker-compose.yml ----------------------------------------------------------------------------------------------


def compose(engine: str = "") -> dict[str, Any]:
    """The compose file, with its variables at their defaults or the engine set."""

    def value(match: re.Match[str]) -> str:
        return engine if engine and match[1] == "SAPO_NODE_INFERENCE__ENGINE" else match[2]

    text = re.sub(r"\$\{(\w+):-([^}]*)\}", value, (ROOT / "docker-compose.yml").read_text())
    assert "$" not in text  # every variable has a default: `docker compose up` asks for nothing
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def service(name: str, engine: str = "") -> dict[str, Any]:
    """One service."""
    found: dict[str, Any] = compose(engine)["services"][name]
    return found


def settings(name: str, engine: str = "") -> NodeConfig:
    """The settings of a service's process: its file, and its environment, which `load` checks."""
    environment = {key: str(value) for key, value in service(name, engine)["environment"].items()}
    return config_load.load(ROOT / "configs" / "compose.yaml", environment).config


def size(text: str) -> int:
    """Bytes of `4g` or `512m`."""
    return int(text[:-1]) * {"m": 1 << 20, "g": GIB}[text[-1]]


def seconds(text: str) -> int:
    """Seconds of `60s`."""
    return int(text.removesuffix("s"))


@pytest.mark.parametrize("engine", ENGINES)
def test_every_setting_in_the_environment_exists(engine: str) -> None:
    assert settings("node", engine).inference.engine == engine
    assert settings("bootstrap", engine)


def test_trainers_sample_with_vllm_unless_told_otherwise() -> None:
    assert settings("node").inference.engine == "vllm"
    assert service("node")["build"]["args"]["ENGINE"] == "vllm"
    assert service("node", "transformers")["build"]["args"]["ENGINE"] == "transformers"


def test_a_node_with_vllm_has_the_memory_it_needs() -> None:
    node = service("node")
    assert size(node["mem_limit"]) >= 3.5 * GIB
    assert size(node["shm_size"]) >= GIB // 2  # Docker's own 64 MiB hold the weights of no real model


def test_nobody_coordinates() -> None:
    services = compose()["services"]
    assert set(services) == {"bootstrap", "node"}
    assert not [name for name, one in services.items() if "depends_on" in one]


def test_nodes_can_be_scaled() -> None:
    """A name, a host port, or a data volume of its own would let only one of them live."""
    node = service("node")
    assert not {"container_name", "ports", "hostname"} & set(node)
    assert not [volume for volume in node["volumes"] if volume.split(":")[1] == "/data"]


def test_a_stop_leaves_time_to_drain() -> None:
    assert seconds(service("node")["stop_grace_period"]) >= settings("node").node.drain_seconds + 15


def test_nodes_read_the_addresses_that_the_bootstrap_peer_writes() -> None:
    bootstrap, node = service("bootstrap"), service("node")
    file = bootstrap["command"][bootstrap["command"].index("--addresses") + 1]
    assert str(settings("node").swarm.peers_file) == file
    folder = str(Path(file).parent)
    (shared,) = {volume for volume in bootstrap["volumes"] if volume.endswith(f":{folder}")}
    assert f"{shared}:ro" in node["volumes"]
    (address,) = settings("bootstrap").swarm.announce
    assert address.startswith("/dns4/bootstrap/")  # the service's name, which survives a new container
    assert address.partition("/tcp/")[2] == settings("bootstrap").swarm.listen[0].partition("/tcp/")[2]


def test_the_bootstrap_peer_keeps_its_key() -> None:
    assert "bootstrap-data:/data" in service("bootstrap")["volumes"]


def test_named_volumes_are_declared() -> None:
    loaded = compose()
    used = {volume.split(":")[0] for one in loaded["services"].values() for volume in one["volumes"]}
    assert used == set(loaded["volumes"])


def test_containers_have_no_privileges() -> None:
    for one in compose()["services"].values():
        assert one["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in one["security_opt"]
        assert "privileged" not in one


def composer() -> list[str]:
    """The compose command of this machine, empty where there is none."""
    if shutil.which("docker"):
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        if plugin.returncode == 0:
            return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


@pytest.mark.parametrize("engine", ENGINES)
def test_compose_accepts_the_file(engine: str) -> None:
    command = composer()
    if not command:
        pytest.skip("no docker compose here")
    env = {**os.environ, "SAPO_NODE_INFERENCE__ENGINE": engine}
    done = subprocess.run(
        [*command, "--file", "docker-compose.yml", "config"],
        cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["services"]["node"]["image"] == f"sapo-node:{engine}"


# ---- the smoke test --------------------------------------------------------------------------------------------------


def test_the_smoke_test_can_be_run_and_refuses_another_engine() -> None:
    script = ROOT / "scripts" / "smoke_compose.sh"
    assert os.access(script, os.X_OK)
    help_text = subprocess.run([script, "--help"], capture_output=True, text=True, check=True, timeout=20).stdout
    assert "scripts/smoke_compose.sh transformers" in help_text
    refused = subprocess.run([script, "sglang"], capture_output=True, text=True, check=False, timeout=20)
    assert refused.returncode == 2
    assert "not sglang" in refused.stderr
