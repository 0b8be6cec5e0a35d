#!/usr/bin/env python3
"""Runs the commands of docs/placements.md and writes what they measured.

usage: tools/placements.py TESSERA [--profile FILE] [--only TEXT]... [--write]

Each section has one fenced `sh` block with one `tessera run` command, which is
run from the root of the repository with the binary TESSERA. Prints a table;
with --write the line below each block is renewed. Exit status 1 when a command
fails.
"""
import argparse
import datetime
import json
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "placements.md"
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
COMMAND = re.compile(r"```sh\n(tessera run .*?)\n```\n(?:\n?Measured .*?(?:\n\n|\Z))?",
                     re.DOTALL)


def run(tessera, command, profile):
    words = shlex.split(command.replace("\\\n", " "))
    words[0] = tessera
    words.append("--json")
    if profile and "--profile" not in words:
        words += ["--profile", profile]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"exit {done.returncode}")
    return json.loads(done.stdout)


def peak(report):
    return max(rank["total"] for rank in report["memory"]["per_rank"])


def describe(report):
    measured, predicted = report["measured"], report["predicted"]
    step, expected = measured["step_time_s"], predicted["step_time_s"]
    memory, planned = peak(report), peak(predicted)
    row = (f"{step * 1e3:.0f} ms", f"{expected * 1e3:.0f} ms",
           f"{expected / step:.2f}", f"{memory / 1e6:.1f} MB",
           f"{planned / memory:.3f}")
    date = datetime.date.today().isoformat()
    line = (f"Measured {date}: step {row[0]} (predicted {row[1]}, {row[2]} of "
            f"it), peak\n{row[3]} (predicted {row[4]} of it).\n\n")
    return row, line


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tessera")
    parser.add_argument("--profile")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    tessera = str(pathlib.Path(options.tessera).resolve())
    profile = options.profile and str(pathlib.Path(options.profile).resolve())

    text = PAGE.read_text()
    starts = list(SECTION.finditer(text)) + [None]
    page = text[:starts[0].start()] if starts[0] else text
    failed = False
    header = ("row", "step", "predicted", "ratio", "peak", "ratio")
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for here, following in zip(starts, starts[1:]):
        end = following.start() if following else len(text)
        section = text[here.start():end]
        title = here.group(1)
        block = COMMAND.search(section)
        wanted = not options.only or any(
            only.lower() in title.lower() for only in options.only)
        if block and wanted:
            try:
                row, line = describe(run(tessera, block.group(1), profile))
                print(f"| {title} | " + " | ".join(row) + " |", flush=True)
                fenced = f"```sh\n{block.group(1)}\n```\n\n"
                section = (section[:block.start()] + fenced + line +
                           section[block.end():].lstrip("\n"))
            except (RuntimeError, KeyError, ValueError) as error:
                failed = True
                print(f"| {title} | failed: {error} |", flush=True)
        elif not block:
            print(f"| {title} | no command |")
        page += section
    if options.write:
        PAGE.write_text(page.rstrip("\n") + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
