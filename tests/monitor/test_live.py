"""The table shows every node's numbers; without a terminal it is a line now and then."""

import io

import msgspec
from rich.console import Console

from sapo_node.monitor.live import LINE_SECONDS, Row, Screen, clock, header, plain, render, stage
from sapo_node.monitor.status import NodeStatus

TRAINING = NodeStatus(
    pid=1,
    state="training",
    started_at=0.0,
    updated_at=1.0,
    round=17,
    peers=3,
    own_groups=1234,
    external_groups_used=56,
    reward_first_drawn=0.2109,
    held_out=0.31,
    held_out_start=0.08,
)


def text_of(rows: list[Row], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(rows, "the title"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_row_shows_all_the_numbers() -> None:
    text = text_of([Row(name="node-1", status=TRAINING)])
    for shown in ("the title", "node-1", "training", "17", "3", "1,234", "56", "0.211", "0.310 (+0.230)"):
        assert shown in text


def test_it_fits_into_eighty_columns() -> None:
    text = text_of([Row(name="node-1", status=TRAINING)], width=80)
    assert "0.310 (+0.230)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_node_without_a_status_is_starting() -> None:
    assert "starting" in text_of([Row(name="node-1")])


def test_an_ended_node_says_how_it_ended() -> None:
    assert "failed" in text_of([Row(name="node-1", status=TRAINING, ended="failed")])


def test_a_name_is_no_markup() -> None:
    assert "[bold]x[/bold]" in text_of([Row(name="[bold]x[/bold]", status=TRAINING)])


def test_the_plain_line_is_one_line_with_sums_and_means() -> None:
    other = msgspec.structs.replace(TRAINING, own_groups=6, reward_first_drawn=0.1891, held_out=0.11)
    line = plain([Row(name="a", status=TRAINING), Row(name="b", status=other)], "1:00")
    assert "\n" not in line
    assert line.startswith("1:00 · states training training · rounds 17 17 · peers 3 3 · own groups 1,240 · ")
    assert line.endswith("external groups used 112 · reward 0.200 · held-out 0.210 (+0.130)")


def test_stages() -> None:
    assert stage([Row(name="a")]).startswith("setting up")
    assert stage([Row(name="a", status=msgspec.structs.replace(TRAINING, round=0))]).startswith("setting up")
    assert stage([Row(name="a"), Row(name="b", status=TRAINING)]) == "training"
    assert stage([Row(name="a", status=TRAINING)], ending=True).startswith("ending")
    assert stage([Row(name="a", ended="failed"), Row(name="b", ended="finished")], ending=True) == "ended"


def test_the_header_tells_time_spent_and_left() -> None:
    assert header("training", 61.0, seconds=240.0) == "1:01, 2:59 left · training"
    assert header("training", 300.0, seconds=240.0) == "5:00, 0:00 left · training"
    assert header("training", 5.0, rounds=20) == "0:05, to round 20 · training"
    assert clock(3661) == "1:01:01"


def test_without_a_terminal_lines_come_now_and_then() -> None:
    now = 0.0
    file = io.StringIO()
    with Screen(Console(file=file), clock=lambda: now) as screen:
        screen.show([Row(name="a", status=TRAINING)], "first")
        now = LINE_SECONDS / 2
        screen.show([Row(name="a", status=TRAINING)], "second")
        now = LINE_SECONDS
        screen.show([Row(name="a", status=TRAINING)], "third")
    assert [line.split()[0] for line in file.getvalue().splitlines()] == ["first", "third"]


def test_on_a_terminal_the_last_table_stays() -> None:
    file = io.StringIO()
    with Screen(Console(file=file, force_terminal=True, width=100)) as screen:
        screen.show([Row(name="node-1")], "title")
        screen.say("node-2 [died]")
    assert "node-2 [died]" in file.getvalue()
    assert "node-1" in file.getvalue().rsplit("node-2 [died]")[-1]
