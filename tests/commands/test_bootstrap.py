"""The settings of a bootstrap peer and what it hands around; tests/e2e/test_bootstrap.py runs it."""

import subprocess
import sys

import pytest

from sapo_node import config_load
from sapo_node.commands import bootstrap
from sapo_node.errors import ConfigError


def test_without_a_chosen_port_it_takes_one_that_stays() -> None:
    assert bootstrap.settings(config_load.load(None, {})).swarm.listen == [bootstrap.DEFAULT_LISTEN]


def test_a_chosen_port_stays_chosen() -> None:
    loaded = config_load.load(None, {"SAPO_NODE_SWARM__LISTEN": '["/ip4/127.0.0.1/tcp/7"]'})
    assert bootstrap.settings(loaded).swarm.listen == ["/ip4/127.0.0.1/tcp/7"]


def test_without_a_network_there_is_nothing_to_serve() -> None:
    with pytest.raises(ConfigError, match=r"swarm\.enabled"):
        bootstrap.settings(config_load.load(None, {}, ["swarm.enabled=false"]))


def test_loopback_is_handed_around_only_for_want_of_others() -> None:
    local, outside = "/ip4/127.0.0.1/tcp/1/p2p/x", "/dns4/example.org/tcp/1/p2p/x"
    assert bootstrap.worth_telling([local, outside]) == [outside]
    assert bootstrap.worth_telling([local]) == [local]


def test_it_needs_no_model_code() -> None:
    code = (
        "import sys, sapo_node.commands.bootstrap; print({'torch', 'transformers', 'reasoning_gym'} & {*sys.modules})"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
