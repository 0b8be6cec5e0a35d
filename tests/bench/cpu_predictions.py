#!/usr/bin/env python3
"""How far off predictions are on this host's cores, with a profile and without.

Profiles 2 and 4 ranks, trains a small GPT-2 under plans of all kinds with
`tessera run --profile`, and writes of each the predicted and the measured step
time as JSON, and what is predicted of assumed cores: where
costmodel/whatif/band.cc has its figures from.

  tests/bench/cpu_predictions.py build/release/tessera OUT.json

About five minutes. Exits with 1 where a command fails.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
MODEL = ["--model", str(EXAMPLES / "models/gpt2-tiny/config.json"),
         "--global-batch", "16", "--seq-len", "128", "--dtype", "fp32"]
STRATEGIES = {
    2: ["dp=2,mbs=8", "dp=2,mbs=8,zero=1", "dp=2,mbs=8,zero=3", "tp=2,mbs=16",
        "tp=2,sp=1,mbs=8", "pp=2,mbs=4", "pp=2,mbs=2,schedule=gpipe",
        "pp=2,vp=2,mbs=4,schedule=interleaved"],
    4: ["dp=4,mbs=4", "dp=4,mbs=4,zero=1", "dp=4,mbs=4,zero=3", "tp=4,mbs=16",
        "dp=2,tp=2,mbs=8", "dp=2,tp=2,sp=1,mbs=4", "pp=4,mbs=2",
        "dp=2,pp=2,mbs=4", "tp=2,pp=2,mbs=4"],
}


def tessera(binary, *arguments):
    """The standard output of a command."""
    done = subprocess.run([binary, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tessera")
    parser.add_argument("output")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for ranks, strategies in STRATEGIES.items():
            cluster = ["--cluster", f"local-cpu:{ranks}"]
            profile = f"{work}/{ranks}.pb"
            tessera(options.tessera, "profile", *cluster, *MODEL, "-o", profile)
            for strategy in strategies:
                run = json.loads(tessera(
                    options.tessera, "run", *MODEL, *cluster, "--nproc",
                    str(ranks), "--data", str(EXAMPLES / "data/gpl-3.txt"),
                    "--steps", "20", "--seed", "1", "--strategy", strategy,
                    "--profile", profile, "--json"))
                assumed = json.loads(tessera(
                    options.tessera, "run", *MODEL, "--nproc", str(ranks),
                    "--data", str(EXAMPLES / "data/gpl-3.txt"), "--steps", "1",
                    "--strategy", strategy, "--json"))
                rows.append({
                    "ranks": ranks, "strategy": strategy,
                    "predicted_step_time_s": run["predicted"]["step_time_s"],
                    "assumed_step_time_s": assumed["predicted"]["step_time_s"],
                    "step_time_s": run["step_time_s"]})
                print(rows[-1], file=sys.stderr)

    def errors(of):
        return [abs(row[of] / row["step_time_s"] - 1) for row in rows]

    profiled = errors("predicted_step_time_s")
    assumed = errors("assumed_step_time_s")
    with open(options.output, "w") as out:
        json.dump({"model": "gpt2-tiny", "cores": os.cpu_count(),
                   "median_error": statistics.median(profiled),
                   "mean_error": statistics.mean(profiled),
                   "assumed_median_error": statistics.median(assumed),
                   "assumed_mean_error": statistics.mean(assumed),
                   "rows": rows},
                  out, indent=1)
        out.write("\n")


if __name__ == "__main__":
    main()
