#!/usr/bin/env python3
"""FlexFlow's six networks on its two clusters: what the search finds, against
data parallelism and the experts' plans of its paper: for the recurrent ones one
layer after the other on the devices of a node and data parallelism between nodes,
for the others "one weird trick" (Krizhevsky 2014): data parallelism, but for the
dense layers at the end, which are split over all devices.

usage: tests/bench/flexflow.py TESSERA [--proposals N] [--devices N…] [MODEL…]

Prints a table in Markdown: predicted step times, how many times as long the
others take, what all devices send one another in a step under each, how long the
search ran, its sweep included, and proposals a second of that. Batches are those of Jia et al., SysML 2019, section 8.1:
64 samples a device, 256 of AlexNet, fp32.
"""

import argparse
import json
import math
import re
import subprocess

MODELS = ["alexnet", "inception-v3", "resnet-101", "rnntc", "rnnlm", "nmt"]
CLUSTERS = {"p100-edr": 16, "k80-fdr": 64}  # most devices; nodes have four
# Layers that can be on devices of their own, lookups and head with them.
LAYERS = {"rnntc": 4, "rnnlm": 2, "nmt": 4}
# The dense layers of the others.
DENSE = {"alexnet": "classifier", "inception-v3": "15",
         "resnet-101": "classifier"}


def tessera(binary, verb, *arguments):
    done = subprocess.run([binary, verb, *arguments, "--json"],
                          capture_output=True, text=True)
    if done.returncode == 2 and "no plan was found" in done.stderr:
        return {"moved_bytes": float("nan")}, None
    if done.returncode not in (0, 3):
        raise SystemExit(f"{verb} {' '.join(arguments)}\n{done.stderr}")
    return json.loads(done.stdout), done.returncode == 0


def row(args, model, cluster, devices):
    nodes = max(1, devices // 4)
    preset = f"{cluster}:{nodes}" if devices >= 4 else f"{cluster}:1x{devices}"
    batch = devices * (256 if model == "alexnet" else 64)
    job = ["--model", f"zoo:{model}", "--cluster", preset, "--global-batch",
           str(batch), "--dtype", "fp32"]
    found, fits = tessera(args.tessera, "search", *job, "--prefer", "fastest",
                          "--proposals", str(args.proposals))
    step = found["margin"]["fastest_step_time_s"]
    ddp = next(b["strategy"] for b in found["baselines"] if b["name"] == "DDP")
    data = tessera(args.tessera, "simulate", *job, "--strategy",
                   "mbs=" + re.search(r"mbs(\d+)", ddp)[1])
    if model in LAYERS:
        stages = min(LAYERS[model], 4, devices)
        expert = tessera(args.tessera, "simulate", *job, "--strategy",
                         f"pp={stages},mbs={batch // (devices // stages)}")
    else:
        expert = tessera(args.tessera, "search", *job, "--prefer", "fastest",
                         "--confirm", "0", "--proposals", "1", "--fix",
                         f"{DENSE[model]}=tp:{devices}")

    def over(result):
        found, fits = result
        if fits is None:
            return "none"
        return f"{found['step_time_s'] / step:.2f}" if fits else "does not fit"

    sent = " / ".join("-" if math.isnan(result["moved_bytes"])
                      else f"{result['moved_bytes'] * 1e-9:.1f}"
                      for result in (data[0], expert[0], found))
    seconds = found["search_time_s"]
    print(f"| {model} | {cluster} | {devices} | {step * 1e3:.1f} | {over(data)} "
          f"| {over(expert)} | {sent} | {seconds:.1f} "
          f"| {found['proposals'] / max(seconds, 1e-9):.0f} "
          f"| {found['margin']['candidates'][0]['strategy']} |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera")
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--proposals", type=int, default=2000)
    parser.add_argument("--devices", type=int, nargs="*",
                        default=[4, 8, 16, 32, 64])
    args = parser.parse_args()
    print("| network | cluster | devices | step, ms | data parallelism, times "
          "| experts, times | sent, GB: data parallelism / experts / found "
          "| search, s | proposals/s | found |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|---|")
    for model in args.models:
        for cluster, most in CLUSTERS.items():
            for devices in args.devices:
                if devices <= most:
                    row(args, model, cluster, devices)


if __name__ == "__main__":
    main()
