#!/usr/bin/env python3
"""Holds training on GPUs to training on the CPU, plan by plan.

    run_parity.py --tessera BINARY --examples FOLDER --out FILE
                  [--backend NAME] [--graph] [--seconds S] [--only TEXT]
                  [[MODEL/]RANKS:PLAN…]

Runs `tessera run` for a few fp32 steps of tiny models: on one rank of the CPU,
and with every plan on the backend (default: cuda-loopback). With --backend cuda
ranks share a GPU over NCCL (TESSERA_SHARE_GPU=1). --graph is that of the runs
on the backend. FILE gets a JSON object
`rows`, rewritten after each plan: model, ranks, plan, backend, ok, the largest
difference of a step's loss from the CPU's, or the error. Exit status 1 if a
plan fails, is too far off, or none ran. Stops after S seconds (default 600).
DIR in a plan is a folder for its files.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

# The learning rate is high, so that a gradient that is not summed shows in the
# losses of the next steps.
STEPS = 5
COMMON = ["--global-batch", "8", "--seq-len", "32", "--steps", str(STEPS),
          "--dtype", "fp32", "--lr", "1e-2", "--seed", "5", "--json"]

# Losses of about 5. Sums in fp32 in another order change them by 1e-6; fast
# exponentials and divisions, of 2 ulp, by as much again in each layer; AdamW
# divides gradients by their size, so that differences grow from step to step.
TOLERANCE = 1e-3

LOOPBACK = [
    "2:dp=2", "2:dp=2,zero=1", "2:dp=2,zero=2", "2:dp=2,zero=3",
    "2:dp=1,tp=2", "2:dp=1,tp=2,sp=1", "2:dp=1,pp=2,mbs=2",
    "2:dp=1,cp=2", "2:dp=1,cp=2,cp-kind=ring", "2:dp=1,ep=2",
    "4:dp=2,tp=2,zero=1", "4:dp=2,pp=2,mbs=2,zero=2", "4:dp=1,tp=4,sp=1",
    "4:dp=1,pp=4,mbs=2", "4:dp=2,cp=2,zero=3", "4:dp=2,ep=2,mbs=2",
    "8:dp=8,zero=3", "8:dp=2,tp=2,pp=2,mbs=2,zero=1",
    "8:dp=2,tp=4,sp=1,zero=2", "8:dp=1,tp=2,pp=2,cp=2,mbs=4",
    # RMS norms, gates, rotary positions and shared experts.
    "deepseek-tiny/2:dp=2,mbs=2,zero=2", "deepseek-tiny/4:dp=2,tp=2,zero=1",
    # The host's memory and files.
    "1:dp=1,mbs=4,offload=optimizer:host", "1:dp=1,offload=activations:host",
    "2:dp=2,zero=3,offload=optimizer:host,parameters:host",
    "2:dp=2,zero=3,tiles=4,offload=optimizer:file:DIR,parameters:file:DIR",
]
# Every operation takes milliseconds here: ranks have the GPU by turns.
NCCL = ["2:dp=2,zero=1", "2:dp=1,tp=2", "2:dp=1,pp=2,mbs=4", "2:dp=2,zero=3",
        "4:dp=2,tp=2,zero=1", "2:dp=1,pp=2,vp=2,mbs=2,schedule=interleaved"]


def parsed(text):
    """Model, ranks and plan of [MODEL/]RANKS:PLAN."""
    found = re.fullmatch(r"(?:([^/:]+)/)?(\d+):(.*)", text)
    if not found:
        sys.exit(f"run_parity: '{text}': expected [MODEL/]RANKS:PLAN")
    model, ranks, plan = found.groups()
    if not model:
        model = "mixtral-tiny" if "ep=" in plan else "gpt2-tiny"
    return model, int(ranks), plan


class Runner:
    def __init__(self, arguments):
        self.arguments = arguments
        self.end = time.monotonic() + arguments.seconds
        self.on_cpu = {}  # losses by model

    def losses(self, model, flags, limit):
        """Of every step, or the error's text."""
        examples = self.arguments.examples
        command = [self.arguments.tessera, "run", "--model",
                   f"{examples}/models/{model}/config.json", "--data",
                   f"{examples}/data/gpl-3.txt", *COMMON, *flags]
        environment = dict(os.environ, TESSERA_SHARE_GPU="1")
        left = self.end - time.monotonic()
        if left < 1:
            return "no time is left"
        try:
            done = subprocess.run(command, capture_output=True, text=True,
                                  env=environment, timeout=min(limit, left))
        except OSError as error:
            return str(error)
        except subprocess.TimeoutExpired:
            return f"took longer than {min(limit, left):.0f} s"
        if done.returncode != 0:
            return f"exit code {done.returncode}: {done.stderr.strip()[-600:]}"
        return json.loads(done.stdout)["losses"]

    def row(self, model, ranks, plan):
        backend = self.arguments.backend
        row = {"model": model, "ranks": ranks, "plan": plan,
               "backend": backend, "ok": False}
        if model not in self.on_cpu:
            self.on_cpu[model] = self.losses(model, ["--backend", "cpu"], 60)
        expected = self.on_cpu[model]
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            actual = self.losses(model, ["--backend", backend, "--nproc",
                                         str(ranks), "--strategy",
                                         plan.replace(":DIR", f":{folder}"),
                                         *self.arguments.graph], 120)
        row["seconds"] = round(time.monotonic() - begin, 3)
        for losses in (expected, actual):
            if isinstance(losses, str):
                return {**row, "error": losses}
        worst = max(abs(a - b) for a, b in zip(actual, expected))
        row["max_loss_difference"] = worst
        row["tolerance"] = TOLERANCE
        # A loss that is not a number is not below.
        row["ok"] = len(actual) == len(expected) == STEPS and worst < TOLERANCE
        return row


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--examples", required=True)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--backend", default="cuda-loopback")
    parser.add_argument("--graph", action="store_const", const=["--graph"],
                        default=[])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", default="", help="plans with TEXT in them")
    parser.add_argument("plans", nargs="*", metavar="RANKS:PLAN")
    arguments = parser.parse_intermixed_args()
    plans = arguments.plans or (
        NCCL if arguments.backend == "cuda" else LOOPBACK)
    wanted = [(text, parsed(text)) for text in plans if arguments.only in text]
    runner = Runner(arguments)
    rows = []
    for text, parts in wanted:
        row = runner.row(*parts)
        rows.append(row)
        what = row.get("error") or f"{row['max_loss_difference']:.2e}"
        print("ok" if row["ok"] else "FAILED", row["model"], text, what,
              flush=True)
        arguments.out.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    sys.exit(0 if rows and all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
