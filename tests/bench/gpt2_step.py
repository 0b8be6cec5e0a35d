#!/usr/bin/env python3
"""Times a training step of GPT-2 124M beside PyTorch's, on this machine.

usage: tests/bench/gpt2_step.py TESSERA [--python PYTHON] [--rounds N]

Both programs stay loaded and one is stopped while the other takes a step, so
that they share what else the machine does. Prints each one's median and
shortest step and the ratios. PYTHON is one that has torch.
"""

import argparse
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def start_tessera(binary, args):
    return subprocess.Popen(
        [binary, "run", "--model", ROOT / "examples/models/gpt2/config.json",
         "--data", ROOT / "examples/data/gpl-3.txt", "--global-batch", "4",
         "--seq-len", "256", "--dtype", "fp32", "--steps", "1000000",
         "--nproc", "1", "--threads", str(args.threads)],
        stdout=subprocess.PIPE, text=True, start_new_session=True)


def tessera_step(process):
    """Seconds until the next step's line; between steps the ranks stand still,
    so that the program's own clock would count the other's time."""
    start = time.perf_counter()
    os.killpg(process.pid, signal.SIGCONT)
    for line in process.stdout:
        if line.startswith("step "):
            os.killpg(process.pid, signal.SIGSTOP)
            return time.perf_counter() - start
    sys.exit("tessera ended")


def pytorch_step(process):
    process.stdin.write("step\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    tessera = start_tessera(args.tessera, args)
    pytorch = subprocess.Popen(
        [args.python, ROOT / "tests/bench/pytorch_step.py", "--serve", "--eager",
         "--device", "cpu", "--dtype", "fp32", "--batch", "4", "--seq-len",
         "256", "--model", ROOT / "examples/models/gpt2", "--threads",
         str(args.threads)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        print(pytorch.stdout.readline().strip())
        times = {"tessera": [], "pytorch": []}
        for turn in range(args.rounds + 1):
            ours, theirs = tessera_step(tessera), pytorch_step(pytorch)
            print(f"tessera {ours:.3f} s  pytorch {theirs:.3f} s", flush=True)
            if turn > 0:  # the first step allocates
                times["tessera"].append(ours)
                times["pytorch"].append(theirs)
    finally:
        os.killpg(tessera.pid, signal.SIGKILL)
        pytorch.kill()
    for name, of in (("median", statistics.median), ("shortest", min)):
        ours, theirs = of(times["tessera"]), of(times["pytorch"])
        print(f"{name}: tessera {ours:.3f} s, pytorch {theirs:.3f} s, "
              f"ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
