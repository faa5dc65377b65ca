"""What a stranger sends can neither forge a log line nor reach the terminal as a command."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from sapo_node.monitor import log

ATTACKS = [
    "\x1b[31mred\x1b[0m",
    "\x1b]8;;http://evil\x07click\x1b]8;;\x07",
    "\x9b2Jgone",
    "one\n12:00:00 [info] forged line",
    "one\r\x1b[2Kforged",
    "\u202egnp.exe",
    "a\u200bb\ufeff",
    "line\u2028separator",
    "\ud800",
    "\x00\x08\x7f",
    "\x1bPdcs\x1b\\",
]


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def visible(text: str) -> bool:
    return all(char.isprintable() for char in text)


@pytest.mark.parametrize("attack", ATTACKS)
def test_clean_leaves_only_what_can_be_seen(attack: str) -> None:
    assert visible(log.clean(attack))


@given(st.text(), st.integers(1, 100))
def test_clean_holds_for_any_text(text: str, limit: int) -> None:
    cleaned = log.clean(text, limit)
    assert visible(cleaned)
    assert len(cleaned) <= limit


def test_clean_removes_whole_sequences() -> None:
    assert log.clean("\x1b[1;31mred\x1b[0m and \x1b]0;title\x07plain") == "red and plain"


def test_clean_keeps_ordinary_text_of_any_script() -> None:
    assert log.clean("Grüße, 世界! 2+2=4 🎈") == "Grüße, 世界! 2+2=4 🎈"


def test_clean_shows_that_it_cut() -> None:
    assert log.clean("x" * 100, 10) == "x" * 9 + "…"


@pytest.mark.parametrize("log_format", ["human", "json"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_value_forges_a_line(attack: str, log_format: log.LogFormat) -> None:
    stream = io.StringIO()
    log.setup("info", log_format, stream)
    structlog.get_logger("sapo_node.test").info("heard " + attack, peer=attack, nested={"a": [attack]}, error=attack)
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert visible(text.removesuffix("\n"))


def test_an_exception_keeps_its_lines_but_not_its_escapes() -> None:
    stream = io.StringIO()
    log.setup("info", "human", stream)
    try:
        raise ValueError("bad \x1b[2J\u202e answer")
    except ValueError:
        structlog.get_logger("sapo_node.test").exception("failed")
    text = stream.getvalue()
    assert "ValueError: bad answer" in text
    assert "Traceback" in text
    assert all(visible(line) for line in text.split("\n"))


def test_json_lines_are_json_even_for_nan() -> None:
    stream = io.StringIO()
    log.setup("info", "auto", stream)
    structlog.get_logger("sapo_node.test").info("round", number=3, loss=float("nan"), peers=("a", "b"))
    line = json.loads(stream.getvalue())
    assert line["event"] == "round"
    assert line["level"] == "info"
    assert line["number"] == 3
    assert line["loss"] is None
    assert line["peers"] == ["a", "b"]
    assert line["time"].endswith("Z")


def test_a_terminal_gets_human_lines() -> None:
    stream = Terminal()
    log.setup("info", "auto", stream)
    structlog.get_logger("sapo_node.test").info("round", reward=0.123456789)
    assert "0.1235" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_own_lines_below_the_level_are_left_out() -> None:
    stream = io.StringIO()
    log.setup("warning", "json", stream)
    structlog.get_logger("sapo_node.test").info("quiet")
    structlog.get_logger("sapo_node.test").warning("loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()


def test_libraries_speak_at_warning_level_in_the_same_format() -> None:
    stream = io.StringIO()
    log.setup("debug", "json", stream)
    logging.getLogger("hivemind.dht").info("chatter")
    logging.getLogger("hivemind.dht").warning("trouble with %s", "\x1b[31mpeer")
    line = json.loads(stream.getvalue())
    assert line["event"] == "trouble with peer"
    assert line["library"] == "hivemind.dht"


def test_a_library_with_a_handler_of_its_own_is_taken_over() -> None:
    stream, elsewhere = io.StringIO(), io.StringIO()
    log.setup("info", "json", stream)
    noisy = logging.getLogger("noisy_library")
    noisy.addHandler(logging.StreamHandler(elsewhere))
    noisy.propagate = False
    log.adopt("noisy_library")
    noisy.warning("trouble")
    assert elsewhere.getvalue() == ""
    assert "trouble" in stream.getvalue()


def test_setting_up_twice_writes_each_line_once() -> None:
    stream = io.StringIO()
    log.setup("info", "json", stream)
    log.setup("info", "json", stream)
    structlog.get_logger("sapo_node.test").info("once")
    assert stream.getvalue().count("once") == 1


def test_what_is_printed_keeps_its_layout_and_loses_what_a_terminal_obeys() -> None:
    assert log.harmless("a  b\n\t c\x1b[2J\x1b]0;pwn\x07\x9b31m\u202e\r") == "a  b\n\t c"
