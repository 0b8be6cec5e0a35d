#!/usr/bin/env python3
"""How walks at temperatures find plans, beside hill climbing and a random walk.

usage: tests/bench/search_walks.py TESSERA OUT.svg [--seeds N] [--proposals N]
                                   [INSTANCE…]

Runs each instance with each seed three times, from the same starting plans: as
`tessera search` does (parallel tempering), with temperatures at which no worse
plan is accepted (hill climbing), and at which every plan that fits is (a random
walk). Draws the best step time so far against proposals, the median over the
seeds as a line and the quartiles as a band, over the best starting plan's, and
prints a table in Markdown of what is left of it after all proposals.
"""

import argparse
import json
import statistics
import subprocess
import sys

INSTANCES = {
    "alexnet, 16 P100": ["zoo:alexnet", "p100-edr:4", 4096, None, "fp32"],
    "nmt, 16 P100": ["zoo:nmt", "p100-edr:4", 1024, None, "fp32"],
    "gpt2-xl, 8 V100": ["zoo:gpt2-xl", "dgx1-v100-32gb:1", 64, 1024, "fp16"],
    "mixtral-8x7b, 64 H100": ["zoo:mixtral-8x7b", "dgx-h100:8", 512, 4096,
                              "bf16"],
    "llama-3-8b, 131,072 tokens, 32 H100": ["zoo:llama-3-8b", "dgx-h100:4", 8,
                                            131072, "bf16", "--set",
                                            "model.max_position_embeddings="
                                            "131072"],
}
METHODS = {  # temperature, colour
    "parallel tempering": (0.1, "#0072b2"),
    "hill climbing": (1e-9, "#d55e00"),
    "random walk": (1e9, "#888888"),
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 250, 200, 60, 40, 80
POINTS = 100


def search(tessera, instance, temperature, seed, proposals):
    """The best step time so far at POINTS moments, over the best start's."""
    model, cluster, batch, length, dtype, *more = instance
    command = [tessera, "search", "--model", model, "--cluster", cluster,
               "--global-batch", str(batch), "--dtype", dtype, "--proposals",
               str(proposals), "--seed", str(seed), "--temperature",
               str(temperature), "--confirm", "0", "--prefer", "fastest",
               "--json", *more]
    if length:
        command += ["--seq-len", str(length)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    found = json.loads(done.stdout)["statistics"]
    chains = len(found["chains"])
    start = min(c["start_step_time_s"] for c in found["chains"]
                if c["start_step_time_s"] > 0)
    # Chains take turns of equal length.
    points = sorted((p["proposal"] * chains, p["step_time_s"])
                    for p in found["trace"])
    curve, best, at = [], start, 0
    for i in range(1, POINTS + 1):
        while at < len(points) and points[at][0] <= i * proposals / POINTS:
            best = min(best, points[at][1])
            at += 1
        curve.append(best / start)
    return curve


def panel(name, curves, x0, proposals):
    """curves: {method: [curve of each seed]}"""
    least = min(min(map(min, runs)) for runs in curves.values())
    low = 1 - max(1e-4, 1 - least) * 1.08

    def at(i, value):
        x = x0 + (i + 1) / POINTS * WIDTH
        return f"{x:.1f},{TOP + (1 - value) / (1 - low) * HEIGHT:.1f}"

    out = [f'<rect x="{x0}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" '
           'fill="none" stroke="#888"/>',
           f'<text x="{x0 + WIDTH / 2}" y="{TOP - 10}" '
           f'text-anchor="middle">{name}</text>',
           f'<text x="{x0 + WIDTH}" y="{TOP + HEIGHT + 18}" '
           f'text-anchor="end">{proposals} proposals</text>']
    for part in range(5):
        value = 1 - part / 4 * (1 - low)
        y = TOP + part / 4 * HEIGHT
        out.append(f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{y}" y2="{y}" '
                   'stroke="#ddd"/>')
        out.append(f'<text x="{x0 - 6}" y="{y + 4}" '
                   f'text-anchor="end">{value:.4f}</text>')
    for method, runs in curves.items():
        colour = METHODS[method][1]
        cuts = [statistics.quantiles(values, n=4, method="inclusive")
                for values in zip(*runs)]
        band = ([at(i, c[2]) for i, c in enumerate(cuts)] +
                [at(i, c[0]) for i, c in reversed(list(enumerate(cuts)))])
        out.append(f'<polygon points="{" ".join(band)}" fill="{colour}" '
                   'fill-opacity="0.15"/>')
        line = " ".join(at(i, c[1]) for i, c in enumerate(cuts))
        out.append(f'<polyline points="{line}" fill="none" '
                   f'stroke="{colour}" stroke-width="1.5"/>')
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera")
    parser.add_argument("svg")
    parser.add_argument("instances", nargs="*", default=list(INSTANCES))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--proposals", type=int, default=1000)
    args = parser.parse_intermixed_args()
    width = LEFT + len(args.instances) * (WIDTH + GAP)
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
           f'height="{TOP + HEIGHT + 60}" font-family="sans-serif" '
           'font-size="12">',
           f'<rect width="{width}" height="{TOP + HEIGHT + 60}" fill="white"/>']
    for m, (method, (_, colour)) in enumerate(METHODS.items()):
        x, y = LEFT + 160 * m, TOP + HEIGHT + 45
        svg.append(f'<line x1="{x}" x2="{x + 20}" y1="{y - 4}" y2="{y - 4}" '
                   f'stroke="{colour}" stroke-width="2"/>')
        svg.append(f'<text x="{x + 26}" y="{y}">{method}</text>')
    print(f"| best after {args.proposals} proposals, over the best start's, "
          f"median of {args.seeds} seeds (best, worst) | "
          + " | ".join(METHODS) + " |")
    print("|---|" + "--:|" * len(METHODS))
    for i, name in enumerate(args.instances):
        curves = {method: [search(args.tessera, INSTANCES[name], temperature,
                                  seed, args.proposals)
                           for seed in range(args.seeds)]
                  for method, (temperature, _) in METHODS.items()}
        svg += panel(name, curves, LEFT + i * (WIDTH + GAP), args.proposals)
        ends = [sorted(run[-1] for run in runs) for runs in curves.values()]
        print(f"| {name} | " + " | ".join(
            f"{statistics.median(e):.4f} ({e[0]:.4f}, {e[-1]:.4f})"
            for e in ends) + " |", flush=True)
    svg.append("</svg>")
    with open(args.svg, "w", encoding="utf-8") as file:
        file.write("\n".join(svg) + "\n")


if __name__ == "__main__":
    main()
