#!/usr/bin/env python3
"""Compares the losses of two runs, given the outputs of `tessera run --json`.

Prints both curves side by side; exit status 1 if they differ by more than 1e-5
in one of the first 20 steps. (A split changes only the rounding of fp32, but
training amplifies every difference, so later steps may drift further.)
"""

import json
import sys

STEPS = 20
TOLERANCE = 1e-5


def main(one_file, other_file):
    with open(one_file) as one, open(other_file) as other:
        one, other = json.load(one)["losses"], json.load(other)["losses"]
    print(f"{'step':>4} {one_file:>20} {other_file:>20} {'|difference|':>13}")
    differences = [abs(a - b) for a, b in zip(one, other)]
    for step, (a, b, difference) in enumerate(zip(one, other, differences)):
        print(f"{step + 1:4} {a:20.7f} {b:20.7f} {difference:13.1e}")
    if len(one) != len(other) or len(one) < STEPS:
        print(f"compare_losses: {len(one)} and {len(other)} steps; expected "
              f"two curves of one length of at least {STEPS}")
        return 1
    # Written so that a NaN fails.
    worst = max(differences[:STEPS], key=lambda d: (d != d, d))
    agrees = worst <= TOLERANCE
    print(f"max |difference| over the first {STEPS} steps: {worst:.1e} "
          f"({'at most' if agrees else 'MORE THAN'} {TOLERANCE:.0e})")
    return 0 if agrees else 1


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: compare_losses.py RUN.json OTHER_RUN.json")
    sys.exit(main(*sys.argv[1:]))
