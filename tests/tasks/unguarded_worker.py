"""A scorer worker whose answers are not filtered before an evaluating scorer sees them: only the sandbox is left.

It lets the tests put hostile answers through the whole pool.
"""

from sapo_node.tasks import scorer_worker


def main() -> None:
    """Take the filters away, then be the real worker."""
    from sapo_node.tasks import reasoning_gym

    reasoning_gym._MUST_FIT.clear()
    scorer_worker.main()
