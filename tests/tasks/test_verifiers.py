"""Right and wrong answers to rows of data sets."""

import pytest

from sapo_node.tasks.verifiers import choice, exact, numeric, readable_truth


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [("a  b\n", "a b", True), ("a b", "ab", False), ("A", "a", False), ("", "a", False)],
)
def test_exact_reads_over_space_only(answer: str, truth: str, right: bool) -> None:
    assert exact(answer, truth) is right


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("1,234.50", "1234.5", True),
        ("1234567", "1,234,567", True),
        ("1,23", "123", False),
        ("12,34", "1234", False),
        ("$5", "5", True),
        ("50 %", "50", True),
        ("+.5", "0.5", True),
        ("1e3", "1000", True),
        ("0.3333333", "0.33333333", True),
        ("0.3", "0.33333333", False),
        ("1000000.9", "1000000", True),
        ("1000002", "1000000", False),
        ("5 apples", "5", False),
        ("nan", "nan", False),
        ("inf", "inf", False),
        ("1e999", "1e999", False),
        ("", "0", False),
        ("-", "0", False),
        ("e5", "0", False),
        ("٣", "3", False),
        ("1" * 5000, "1", False),
    ],
)
def test_numeric_compares_finite_numbers(answer: str, truth: str, right: bool) -> None:
    assert numeric(answer, truth) is right


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("B", "b", True),
        ("(b)", "B", True),
        ("B.", "B", True),
        ("B)", "(B)", True),
        ("A", "B", False),
        ("B because", "B", False),
        ("AB", "B", False),
        ("", "B", False),
        ("", "", False),
    ],
)
def test_choice_compares_one_letter(answer: str, truth: str, right: bool) -> None:
    assert choice(answer, truth) is right


def test_a_truth_that_can_never_be_matched_is_told() -> None:
    assert "finite number" in str(readable_truth("numeric", "many"))
    assert "one letter" in str(readable_truth("choice", "both"))
    assert readable_truth("exact", "anything") is None
    assert readable_truth("numeric", "1,000") is None
