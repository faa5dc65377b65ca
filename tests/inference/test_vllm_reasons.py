"""What people are told of an engine's end, from what the processes below it said."""

import pytest

from sapo_node.inference.vllm import summary

ENDED = "the inference worker ended with exit code 1 in stage 'sampling': vLLM's engine ended"


def line(code: str) -> str:
    return (
        f"(EngineCore pid=7) ERROR [x.py:1] Worker proc VllmWorker-0 died unexpectedly (exit code: {code}), shutting."
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [("-9", "; VllmWorker-0 was killed by SIGKILL"), ("None", "; VllmWorker-0 is gone, as after a SIGKILL"), ("1", "")],
)
def test_how_a_process_below_the_engines_core_was_killed_is_told(code: str, words: str) -> None:
    assert summary(f"{ENDED}\n  a traceback", ["before", line(code), "after"]) == ENDED + words


def test_a_reason_is_one_line() -> None:
    assert summary("first\nsecond", []) == "first"
    assert summary("", []) == ""
