"""A scorer worker that an answer has taken over: it says what it likes on the channel to the node."""

from typing import Any

import msgspec

from sapo_node import workers
from sapo_node.tasks.sandbox import Protection
from sapo_node.tasks.scorer_worker import AboutRequest, Drawn, DrawReply, DrawRequest, JudgeRequest


class AnyReply(msgspec.Struct):
    """A reply of any shape."""

    drawn: Any
    rewards: Any = None
    fault: Any = None
    cpu: Any = 0.0


def judge(request: JudgeRequest) -> AnyReply:
    """Forged rewards, of a kind that the first answer chooses."""
    drawn = Drawn(text="forged", truth=bytes(10_000) if request.texts[0] == "digest" else b"")
    count = len(request.texts)
    forged: dict[str, list[Any]] = {
        "none": [],
        "too many": [1.0] * (count + 5),
        "huge": [1e300] * count,
        "nan": [float("nan")] * count,
        "texts": ["1.0"] * count,
        "negative": [-1.0] * count,
        "digest": [1.0] * count,
        "hours": [1.0] * count,
    }
    cpu = 1e9 if request.texts[0] == "hours" else 0.0
    return AnyReply(drawn=drawn, rewards=forged[request.texts[0]], cpu=cpu)


def draw(request: DrawRequest) -> DrawReply:
    """No questions, or more than were asked for."""
    count = 0 if request.draws[0].seed == 0 else len(request.draws) + 3
    return DrawReply(drawn=[Drawn(text="forged")] * count)


def about(_: AboutRequest) -> Protection:
    """As the real worker."""
    return Protection(landlock=0, seccomp=False, missing=["all of it"])


def main() -> None:
    """Serve."""
    workers.serve({"draw": draw, "judge": judge, "about": about})
