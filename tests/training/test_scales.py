import pytest

from sapo_node.config import TrainingSection
from sapo_node.training.base import Origin
from sapo_node.training.rows import Row, weigh
from sapo_node.training.scales import completion_weight, median_factors, stream_shares, token_scales


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        # completions of 2, 4 and 3 tokens with weights 1, 0.5 and 0
        ("token", [1 / 4, 0.5 / 4, 0.0]),
        ("sequence", [1 / 1.5 / 2, 0.5 / 1.5 / 4, 0.0]),
        ("fixed", [1 / 1.5 / 10, 0.5 / 1.5 / 10, 0.0]),
    ],
)
def test_scales_make_weighted_means(mean: str, expected: list[float]) -> None:
    scales = token_scales([1.0, 0.5, 0.0], [2, 4, 3], mean, 10)  # type: ignore[arg-type]
    # token: (1 x) 1 / (1 x 2 + 0.5 x 4)
    assert scales == pytest.approx(expected)


def test_nothing_to_train_on_divides_by_nothing() -> None:
    for mean in ("token", "sequence", "fixed"):
        assert token_scales([0.0, 1.0], [3, 0], mean, 8) == [0.0, 0.0]  # type: ignore[arg-type]


def test_streams_share_the_loss_by_groups_and_weights() -> None:
    even = {"local": 1.0, "external": 1.0}
    assert stream_shares({"local": 4, "external": 4}, even) == {"local": 0.5, "external": 0.5}  # type: ignore[arg-type]
    assert stream_shares({"local": 6, "external": 2}, even)["external"] == 0.25  # type: ignore[arg-type]
    assert stream_shares({"local": 4, "external": 0}, even) == {"local": 1.0, "external": 0.0}  # type: ignore[arg-type]
    doubled = {"local": 1.0, "external": 2.0}
    assert stream_shares({"local": 4, "external": 4}, doubled)["external"] == pytest.approx(2 / 3)  # type: ignore[arg-type]
    assert stream_shares({"local": 0, "external": 0}, even) == {"local": 0.0, "external": 0.0}  # type: ignore[arg-type]


def test_weights_follow_the_masks() -> None:
    assert completion_weight(-1.0, False) == 1.0
    assert completion_weight(-1.0, False, negative="drop") == 0.0
    assert completion_weight(-1.0, False, negative="downweight") == 0.5
    assert completion_weight(0.0, False, negative="drop") == 1.0
    assert completion_weight(1.0, True) == 0.0
    assert completion_weight(1.0, True, mask_truncated=False) == 1.0


@pytest.mark.parametrize("stream", ["local", "external"])
def test_each_stream_has_its_own_rule_for_negative_advantages(stream: Origin) -> None:
    settings = TrainingSection.model_validate({f"{stream}_negative": "drop"})
    both: tuple[Origin, ...] = ("local", "external")
    rows = [
        Row(origin, "peer", "peer", number, [1], [2, 3], None, advantage, truncated=False)
        for number, origin in enumerate(both)
        for advantage in (1.0, -1.0)
    ]
    weigh(rows, settings, 16)
    dropped = [row for row in rows if row.weight == 0.0]
    assert [(row.origin, row.advantage, row.trained) for row in dropped] == [(stream, -1.0, False)]


@pytest.mark.parametrize(
    ("pulls", "expected"),
    [
        ({"a": 1.0, "b": 2.0, "loud": 20.0}, {"a": 1.0, "b": 1.0, "loud": 0.1}),
        ({"quiet": 1.0, "loud": 4.0}, {"quiet": 1.0, "loud": 0.25}),  # of two the lower one
        ({"alone": 7.0}, {"alone": 1.0}),
        ({"idle": 0.0, "alone": 7.0}, {"idle": 1.0, "alone": 1.0}),
        ({"idle": 0.0}, {"idle": 1.0}),
        ({}, {}),
    ],
)
def test_no_source_pulls_harder_than_the_median(pulls: dict[str, float], expected: dict[str, float]) -> None:
    assert median_factors(pulls) == pytest.approx(expected)


def external(source: str, number: int, tokens: int, advantage: float = 1.0) -> Row:
    return Row("external", "key", source, number, [1], [2] * tokens, None, advantage, truncated=False)


@pytest.mark.parametrize("mean", ["token", "sequence", "fixed"])
def test_many_or_long_groups_of_one_source_count_as_much_as_the_median(mean: str) -> None:
    settings = TrainingSection.model_validate({"external_balance": "sources", "loss_mean": mean})
    rows = [
        Row("local", "me", "me", 0, [1], [2, 3], None, 1.0, truncated=False),
        *(external(source, number, 3) for number, source in enumerate("ab", 1)),
        *(external("loud", number, 9, 2.0) for number in range(3, 7)),
        external("loud", 3, 5, 0.0),
    ]
    weigh(rows, settings, 16)

    def pull(source: str) -> float:
        return sum(row.scale * abs(row.advantage) * len(row.tokens) for row in rows if row.source == source)

    assert pull("loud") == pytest.approx(pull("a"))
    assert pull("a") == pytest.approx(pull("b"))


def test_what_is_taken_from_a_loud_source_is_not_given_to_its_stream() -> None:
    settings = TrainingSection.model_validate({"external_balance": "sources"})
    local = [Row("local", "me", "me", number, [1], [2], None, 1.0, truncated=False) for number in range(4)]
    rows = [*local, external("a", 4, 1), external("b", 5, 1), *(external("loud", number, 1) for number in range(6, 16))]
    weigh(rows, settings, 16)
    assert sum(row.scale for row in local) == pytest.approx(4 / (4 + 12 * 3 / 12))  # three of twelve are left


def test_what_many_groups_repeat_is_one_answer_among_many() -> None:
    """Under `answers` groups that all teach one answer count together as much as the median answer's; a group's answer
    is that of its best completion, and its worse ones go with it."""
    settings = TrainingSection.model_validate({"external_balance": "answers", "external_negative": "keep"})
    rows = []
    for number in range(9):
        answer = b"2" if number < 6 else bytes([number])
        for advantage, said in ((1.0, answer), (-1.0, b"wrong")):
            row = external(str(number % 9), number, 3, advantage)
            row.answer = said
            rows.append(row)
    weigh(rows, settings, 16)
    repeated, others = ([row.scale for row in rows if (row.group_id < 6) is many] for many in (True, False))
    assert sum(repeated) == pytest.approx(sum(others) / 3)
    assert len(set(repeated)) == 1


def test_answers_are_balanced_after_sources() -> None:
    settings = TrainingSection.model_validate({"external_balance": "answers"})
    rows = [external("loud", number, 3) for number in range(4)] + [external("a", 4, 3), external("b", 5, 3)]
    for row in rows:
        row.answer = b"x" if row.source == "loud" else bytes([row.group_id])
    weigh(rows, settings, 16)
    pulls = {source: sum(row.scale for row in rows if row.source == source) for source in ("loud", "a", "b")}
    assert pulls["a"] == pytest.approx(pulls["b"])
    assert pulls["loud"] == pytest.approx(pulls["a"]), "and what was taken for the source is not taken again"
