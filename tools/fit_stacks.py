#!/usr/bin/env python3
"""Fits the figures of stack profiles to published training runs.

Each stack's figures are searched over fixed grids, one after the other, for the
least mean over sources of the mean absolute percentage error of the rows that
the stack stands for. Every source is held out in turn: its error is that of
figures fitted to the others. The figures written are those fitted to all.

  tools/fit_stacks.py build/release/tessera runs.csv -o planner/topology/stack_constants.inc
"""

import argparse
import csv
import datetime
import json
import subprocess
import sys
import tempfile

# What is searched, by key of --stack. Host times in seconds.
GRIDS = {
    "host": [0, 5e-6, 1e-5, 2e-5, 3e-5, 4e-5, 5e-5, 6e-5, 7e-5, 8e-5, 1e-4],
    "traffic": [1, 1.25, 1.5, 1.75, 2, 2.5],
    "optimizer": [1, 1.5, 2, 3],
    "sustained": [1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7],
    "sharded": [0, 100e9, 60e9, 40e9, 30e9, 25e9, 20e9, 15e9, 10e9],
    # Of a collective cut into as many parts as a node has ranks, the last part
    # has no product to hide behind: 1/8 at least.
    "tensor-exposed": [1, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.125],
}
# Which figures of a stack are free: what its rows can tell apart.
FREE = {
    "megatron-2021": ["host", "sustained", "traffic", "sharded"],
    "megatron-core-2024": ["sustained", "traffic", "tensor-exposed"],
    "torchtitan-2024": ["sustained", "traffic"],
    "pytorch-fsdp-2023": ["sustained", "traffic"],
    "pytorch-eager-2022": ["host", "sustained", "traffic"],
    "xla-2022": ["sustained"],
}
# What rows cannot tell apart, with where it is from. Host: 5 to 10 us are what
# PyTorch takes for a kernel's launch through its dispatcher. Logits, in fp32
# values read or written beyond a fused kernel's 1.5 (three of 16 bits):
# Megatron's vocab_parallel_cross_entropy has a copy to fp32 (1.5), a maximum
# (1), a difference, an exponential, a sum and a quotient (2, 2, 1 and 2),
# backward a product and a copy to 16 bits (2 and 1.5), 13 in all; others fuse
# the softmax with some of these. Optimizer: Megatron's copies of gradients and
# parameters between precisions, unscaling and clipping beside Adam itself.
FIXED = {
    "megatron-2021": {"optimizer": 2, "logits": 11.5},
    "megatron-core-2024": {"host": 1e-5, "logits": 8},
    "torchtitan-2024": {"host": 1e-5, "logits": 10},
    "pytorch-fsdp-2023": {"host": 1e-5, "logits": 4},
    "pytorch-eager-2022": {"logits": 8, "optimizer": 2},
    "xla-2022": {"logits": 2},
}
DEFAULTS = {"host": 0, "logits": 8, "traffic": 1, "optimizer": 1,
            "sustained": 1, "tensor-exposed": 1, "sharded": 0}


def one_source(source):
    """Commits of one file are one source."""
    return source.split("@")[0]


class Runs:
    """Predictions of all rows of one stack, kept by its figures."""

    def __init__(self, tessera, table, stack, rows_per_source):
        self.tessera, self.stack = tessera, stack
        self.kept = {}
        # Only the rows that the stack stands for, of each source a sample
        # spread evenly over its table.
        by_source = {}
        for row in self._rows(table):
            by_source.setdefault(row["source"], []).append(row["id"])
        mine = set()
        for ids in by_source.values():
            step = max(1, len(ids) / rows_per_source)
            mine.update(ids[int(i * step)]
                        for i in range(min(len(ids), rows_per_source)))
        self.table = tempfile.NamedTemporaryFile(
            "w", suffix=".csv", newline="", encoding="utf-8")
        with open(table, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            writer = csv.DictWriter(self.table, reader.fieldnames)
            writer.writeheader()
            writer.writerows(row for row in reader if row["id"] in mine)
        self.table.flush()

    def _rows(self, table, *flags):
        out = subprocess.run(
            [self.tessera, "validate", table, "--json", *flags], check=True,
            capture_output=True, text=True).stdout
        return [row for row in json.loads(out)["rows"] if "error" in row
                and f"stack {self.stack}" in row["assumptions"]]

    def errors(self, figures):
        """Mean absolute percentage error by source."""
        key = tuple(sorted({**FIXED[self.stack], **figures}.items()))
        if key not in self.kept:
            text = ",".join([self.stack] + [f"{k}={v:g}" for k, v in key])
            rows = {}
            for row in self._rows(self.table.name, "--stack", text):
                rows.setdefault(one_source(row["source"]), []).append(
                    abs(row["error"]))
            self.kept[key] = {s: sum(e) / len(e) for s, e in rows.items()}
            print(".", end="", file=sys.stderr, flush=True)
        return self.kept[key]


def write_sample(table, path, rows_per_source=6):
    """Some rows of every source, spread evenly over its table."""
    with open(table, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        sources = {}
        for row in reader:
            if (row["full_config"] == "yes" and row["time_any_s"]
                    and row["status"] == "ok"):
                sources.setdefault(row["source"], []).append(row)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, reader.fieldnames, lineterminator="\n")
        writer.writeheader()
        for rows in sources.values():
            step = max(1, len(rows) / rows_per_source)
            for i in range(min(len(rows), rows_per_source)):
                writer.writerow(rows[int(i * step)])


def fit(runs, held_out=None):
    """Figures of least mean error over the sources but `held_out`."""
    figures = {k: GRIDS[k][len(GRIDS[k]) // 2] for k in FREE[runs.stack]}

    def score(candidate):
        errors = [e for s, e in runs.errors(candidate).items() if s != held_out]
        return sum(errors) / len(errors) if errors else 0.0

    for _ in range(4):
        before = dict(figures)
        for key in figures:
            figures[key] = min(
                GRIDS[key], key=lambda v, k=key: score({**figures, k: v}))
        if figures == before:
            break
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tessera")
    parser.add_argument("table")
    parser.add_argument("--stacks", nargs="*", default=list(FREE))
    parser.add_argument("-o", dest="output")
    parser.add_argument("--rows-per-source", type=int, default=40)
    parser.add_argument("--sample", metavar="FILE",
                        help="write some rows of every source, and no more")
    arguments = parser.parse_args()
    if arguments.sample:
        write_sample(arguments.table, arguments.sample)
        return
    out = ["// Written by tools/fit_stacks.py; do not edit. In the order of "
           "StackFigures."]
    for stack in arguments.stacks:
        runs = Runs(arguments.tessera, arguments.table, stack,
                    arguments.rows_per_source)
        all_sources = fit(runs)
        sources = sorted(runs.errors(all_sources))
        print(f"\n{stack}: {all_sources}")
        held = []
        for source in sources if len(sources) > 1 else []:
            figures = fit(runs, source)
            error = runs.errors(figures)[source]
            held.append(error)
            print(f"  held out {error:7.1%}  fitted {runs.errors(all_sources)[source]:7.1%}"
                  f"  {source}  {figures if figures != all_sources else ''}")
        note = (f"{len(sources)} sources, at most {arguments.rows_per_source} "
                f"rows of each, {datetime.date.today()}")
        if held:
            note += (";\n    // mean error of each when held out "
                     f"{sum(held) / len(held):.1%}")
        print(f"  {note}")
        out.append(f"    // {note}")
        values = {**DEFAULTS, **FIXED[stack], **all_sources}.values()
        out.append(f'    {{"{stack}", ' + ", ".join(f"{v:g}" for v in values)
                   + "},")
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            file.write("\n".join(out) + "\n")
    else:
        print("\n".join(out))


if __name__ == "__main__":
    main()
