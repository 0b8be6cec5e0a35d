#!/usr/bin/env python3
"""The textbook's answers against the search, on a table fixed in advance.

usage: tools/textbook.py BINARY [--proposals N] [--row TEXT]

Runs `tessera explain --which-strategy` for each row and prints a table in
Markdown: the situation that the row is for and the one that was found, the best
of the answers that the textbook gives there, and what the search found. A row
agrees where the situation is the one that is meant and the best of its answers
is slower than what the search found by no more than predictions are off.
Nothing is tuned to agree; docs/search.md explains those that do not.
"""
import argparse
import json
import subprocess

# What is meant, and model, global batch, sequence, cluster, further flags.
ROWS = [
    ("one device: the model fits",
     "zoo:gpt2", 32, 1024, "dgx-a100-80gb:1x1", []),
    ("one device: does not fit",
     "zoo:gpt2-xl", 16, 1024, "g5.48xlarge:1x1", []),
    ("one device: does not fit, nor does the host have room",
     "zoo:llama-3-405b", 8, 2048, "dgx-a100-80gb:1x1", []),
    ("one device: the largest layer does not fit",
     "zoo:gpt-1t", 4, 1024, "g4dn.12xlarge:1x1", ["model.layers=2"]),
    ("one node: the model fits on a device",
     "zoo:gpt2-medium", 256, 1024, "dgx-a100-80gb:1", []),
    ("one node: does not fit, with NVLink",
     "zoo:llama-2-7b", 64, 2048, "dgx-a100-80gb:1", []),
    ("one node: does not fit, without NVLink",
     "zoo:llama-2-7b", 64, 2048, "pcie-a100:1", []),
    ("one node: the largest layer does not fit",
     "zoo:gpt-1t", 16, 1024, "g5.48xlarge:1", ["model.layers=1"]),
    ("many nodes: fast network",
     "zoo:llama-2-13b", 256, 2048, "dgx-a100-80gb:4", []),
    ("many nodes: slow network, the model fits on a device",
     "zoo:gpt2", 256, 1024, "g4dn.12xlarge:4", []),
    ("many nodes: slow network, little memory",
     "zoo:opt-6.7b", 128, 1024, "g4dn.12xlarge:8", []),
]


def run(binary, row, proposals):
    _, model, batch, seq, cluster, settings = row
    command = [binary, "explain", "--which-strategy", "--model", model,
               "--global-batch", str(batch), "--seq-len", str(seq),
               "--cluster", cluster, "--proposals", str(proposals), "--json"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def line(row, j):
    meant, model, batch, seq, cluster, settings = row
    situation = next(r for r in j["textbook"] if r["applies"])
    fit = [a for a in j["answers"] if a["advised"] and a.get("feasible")]
    answers = ", ".join(
        f'{a["answer"]} {a["step_time_s"]:.3g} s' for a in fit) or "none fits"
    found = j["found"]
    over = (min(a["step_time_s"] for a in fit) / found["step_time_s"] - 1
            if fit and found["feasible"] else None)
    agrees = (situation["situation"] == meant and over is not None
              and over <= j["band"])
    what = " ".join([model.removeprefix("zoo:"), *settings])
    return (f'| {meant} | {what}, {batch} x {seq}, {cluster} | {answers} | '
            f'{found["name"]}, {found["step_time_s"]:.3g} s'
            f'{"" if found["feasible"] else " (does not fit)"} | '
            f'{"-" if over is None else f"{100 * over:+.1f} %"} | '
            f'{"agrees" if agrees else "differs"}'
            + ("" if situation["situation"] == meant
               else f' (taken for: {situation["situation"]})') + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    parser.add_argument("--proposals", type=int, default=2000)
    parser.add_argument("--row", default="")
    args = parser.parse_args()
    print("| the textbook's row | case | its answers | the search found | "
          "answer over found | |\n|---|---|---|---|---|---|")
    for row in ROWS:
        if args.row in row[0]:
            print(line(row, run(args.binary, row, args.proposals)), flush=True)


if __name__ == "__main__":
    main()
