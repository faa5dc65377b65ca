import pytest

from sapo_node.training.advantages import advantages


def test_std_advantages_have_mean_zero_and_spread_one() -> None:
    values = advantages([1.0, 0.0, 0.0, 0.0], "std")
    assert sum(values) == pytest.approx(0.0)
    assert sum(value**2 for value in values) / 4 == pytest.approx(1.0)
    assert values[0] > 0 > values[1]


def test_mean_advantages_are_only_centred() -> None:
    assert advantages([1.0, 0.0, 0.0, 0.0], "mean") == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("kind", ["std", "mean"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1])
def test_equal_rewards_have_no_advantage(kind: str, reward: float) -> None:
    assert advantages([reward] * 7, kind) == [0.0] * 7  # type: ignore[arg-type]


def test_no_rewards_is_an_error() -> None:
    with pytest.raises(ValueError, match="without rewards"):
        advantages([])
