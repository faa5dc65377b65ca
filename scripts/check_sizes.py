"""Fails when a module of the package grows beyond what one can read in one sitting."""

import sys
from pathlib import Path

MAX_LINES = 500


def main() -> int:
    """0 when every module fits, else 1 with the names of those that do not."""
    root = Path(__file__).parent.parent
    sizes = {path: len(path.read_text().splitlines()) for path in sorted((root / "sapo_node").rglob("*.py"))}
    too_long = {path: lines for path, lines in sizes.items() if lines > MAX_LINES}
    for path, lines in too_long.items():
        print(f"{path.relative_to(root)}: {lines} lines, at most {MAX_LINES}; split it by reasons to change")
    if not too_long:
        print(f"{len(sizes)} modules, the longest {max(sizes.values())} lines")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
