#!/usr/bin/env python
"""Feed hostile bytes to everything in sapo-node that reads bytes of strangers.

    python scripts/fuzz.py                                   10,000 inputs for each surface, about a minute
    python scripts/fuzz.py --surface batch --count 1000000   more, for one of them
    python scripts/fuzz.py --seed 7                          other inputs; the same seed makes the same ones
    python scripts/fuzz.py --surface batch --seed 7 --show 123      print one input as hex

Half of the inputs are valid messages with changed bytes, half are made by the structure of the message: values of the
wrong type or size, lying lengths, deep nesting, and validly signed nonsense. For each: only the documented refusals may
come out, within bounded time and memory; what was taken must read the same when it is written again; and nothing whose
signature is wrong may be decoded. Inputs that broke something are printed as hex. Ends with 1 if there were any.
"""

import argparse
import logging
import sys

from fuzzing.run import fuzz, input_of
from fuzzing.surfaces import SURFACES


def main() -> int:
    """Run the surfaces asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--surface", choices=sorted(SURFACES), action="append", help="default: all of them")
    parser.add_argument("--count", type=int, default=10_000, help="inputs for each surface")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, metavar="NUMBER", help="print an input and feed nothing")
    options = parser.parse_args()
    logging.getLogger("sapo_node").setLevel(logging.ERROR)  # warnings about the inputs are not news here
    broken = 0
    for name in options.surface or SURFACES:
        surface = SURFACES[name]
        if options.show is not None:
            print(input_of(surface, options.seed, options.show).hex())
            continue
        report = fuzz(surface, options.count, options.seed)
        print(report.line(), flush=True)
        for problem in report.broken:
            print(problem)
        broken += len(report.broken)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
