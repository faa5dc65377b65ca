"""Ten thousand hostile inputs for everything that reads bytes of strangers; `scripts/fuzz.py` feeds more."""

import time

import pytest

from sapo_node.rollouts import codec
from scripts.fuzzing.run import Broken, Surface, fuzz, input_of
from scripts.fuzzing.surfaces import SURFACES

COUNT = 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SURFACES)
def test_hostile_inputs_break_nothing(name: str) -> None:
    """Hope: among many inputs there is one with another exception, a second of work, or a wrong reading."""
    report = fuzz(SURFACES[name], COUNT, seed=0)
    print(report.line())
    assert report.broken == []
    assert report.inputs == COUNT
    assert report.taken > 0, "no input is ever taken, so this fuzzes nothing behind the first check"


@pytest.mark.parametrize("name", SURFACES)
def test_a_few_inputs_for_each_surface(name: str) -> None:
    """Hope: as above; the few that are fed in each run of the quick suite."""
    assert fuzz(SURFACES[name], 40, seed=1).broken == []


def test_an_input_is_the_same_in_every_run() -> None:
    """A number that was printed is of use only if it makes the input again."""
    for surface in SURFACES.values():
        assert input_of(surface, 3, 17) == input_of(surface, 3, 17)


def test_the_fuzzer_finds_what_is_broken() -> None:
    """Each property, shown to be able to fail: another exception, too slow, too much memory, a wrong reading."""

    def feed(data: bytes) -> None:
        if data == b"raise":
            raise KeyError(data)
        if data == b"wrong":
            raise Broken("it reads otherwise")
        if data == b"large":
            bytearray(8 << 20)
        raise ValueError("refused")

    def reported(data: bytes, **bounds: float) -> list[str]:
        surface = Surface(name="toy", reads="", make=lambda _: data, feed=feed, refusals=(ValueError,), **bounds)  # type: ignore[arg-type]
        return fuzz(surface, 1, 0).broken

    assert reported(b"fine") == []
    assert "KeyError" in reported(b"raise")[0]
    assert b"raise".hex() in reported(b"raise")[0]
    assert "it reads otherwise" in reported(b"wrong")[0]
    assert "bytes of memory" in reported(b"large")[0]
    assert "more than" in reported(b"fine", seconds=0.0)[0]


def test_an_input_that_is_slow_but_once_breaks_nothing() -> None:
    """A collection of the whole suite's garbage may fall into any of them."""
    fed: list[float] = []

    def feed(data: bytes) -> None:
        until = time.thread_time() + (0.0 if fed and slow_once else 0.02)
        while time.thread_time() < until:
            pass
        fed.append(until)

    for slow_once in (True, False):
        fed.clear()
        surface = Surface(name="toy", reads="", make=lambda _: b"", feed=feed, seconds=0.01)
        assert bool(fuzz(surface, 1, 0).broken) != slow_once


def test_the_fuzzer_sees_a_decoder_that_comes_before_the_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown with a codec that looks into every envelope first."""
    original = codec._open

    def careless(data: bytes, kind: bytes, swarm: str) -> tuple[bytes, bytes]:
        codec._check_structure(b"\xc0")
        return original(data, kind, swarm)

    monkeypatch.setattr(codec, "_open", careless)
    assert "a wrong signature was decoded" in fuzz(SURFACES["batch"], 30, seed=0).broken[0]
