#!/usr/bin/env python3
"""Prints a table of Tessera's operators in Markdown: their gradients, kernels, the
factors that random plans split, and ONNX's own tests that run them.

usage: tests/bench/operators_table.py TESSERA PLANS NODE_TESTS

PLANS is what `tessera_plan_fuzz --plans N` printed, NODE_TESTS what
`onnx_node_tests.py --by-operator` did. A cell of splits has by each factor's
letter in how many of the plans with the operator it was split, forward and in the
operators that are its gradients.
"""

import collections
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def rows_of(tessera, kind):
    done = subprocess.run([tessera, "list", kind, "--json"], check=True,
                          stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)["rows"]


def adjoints():
    """By operator the operators of its gradients, as planner/ops declares."""
    found = {}
    for path in sorted((ROOT / "planner/ops").glob("*.cc")):
        text = path.read_text()
        starts = [(m.start(), m.group(1)) for m in
                  re.finditer(r'\.name = "(\w+)",\s*\.summary', text)]
        for (begin, name), end in zip(
                starts, [s for s, _ in starts[1:]] + [len(text)]):
            found[name] = set(re.findall(
                r'\{"(\w*)",\s*(?:"[dxy0-9,]+->[dx0-9,]+"|\*\w+)\}',
                text[begin:end]))
    # Elementwise functions are rows of a table of their own.
    for name, adjoint in re.findall(
            r'\{"(\w+)",\s*"[^"]*",\s*\{"(\w+)"',
            (ROOT / "planner/ops/elementwise.cc").read_text()):
        found[name] = {adjoint}
    return found


def cuda_kernels():
    names = set()
    for path in (ROOT / "runtime/kernels/cuda").glob("*.cu"):
        names |= set(re.findall(r'\{"(\w+)(?:\.state)?",', path.read_text()))
    return names


def counts(path, pattern):
    return {m.group(1): m.groups()[1:]
            for m in re.finditer(pattern, pathlib.Path(path).read_text())}


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    tessera, plans, tests = sys.argv[1:]
    ops = {row["name"]: row["summary"] for row in rows_of(tessera, "operators")}
    cpu = {row["name"] for row in rows_of(tessera, "kernels")}
    cuda = cuda_kernels()
    backward = adjoints()
    drawn = counts(plans, r"operator (\w+) in (\d+) plans((?: \w:\d+)*)")
    ran = counts(tests, r"operator (\w+) in (\d+) tests")
    of_others = set().union(*backward.values()) - {""}
    # Gradients of several operators are not told apart, nor are operators that
    # are gradients, too.
    shared = {name for name, count in collections.Counter(
        part for parts in backward.values() for part in parts).items()
        if count > 1 or not ops.get(name, "").startswith("gradient")}
    print("| operator | backward | CPU | CUDA | random plans | splits drawn | "
          "ONNX node tests |\n|---|---|---|---|---|---|---|")
    for name, summary in ops.items():
        if name in of_others and (summary.startswith("gradient") or
                                  summary == "sum of gradients"):
            continue
        gradients = backward.get(name, set())
        parts = [name] + sorted(gradients - {"", name})
        split = collections.Counter()
        for part in parts:
            if part in shared and part != name:
                continue
            for letter, count in re.findall(
                    r"(\w):(\d+)", drawn.get(part, ("0", ""))[1]):
                split[letter] = max(split[letter], int(count))
        has = lambda kernels: "yes" if all(
            part in kernels for part in parts) else "no"
        print(f"| {name} | "
              f"{', '.join(sorted(g or 'passes' for g in gradients)) or '-'} | "
              f"{has(cpu)} | {has(cuda)} | {drawn.get(name, ('0',))[0]} | "
              f"{', '.join(f'{k} {v}' for k, v in sorted(split.items())) or '-'}"
              f" | {ran.get(name, ('0',))[0]} |")


if __name__ == "__main__":
    main()
