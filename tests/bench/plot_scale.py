#!/usr/bin/env python3
"""Plots cost against devices, layers and microbatches as SVG.

    build/tests/tessera_bench --benchmark_filter='Devices|Layers|Microbatches' \\
        --benchmark_out=scale.json
    tests/bench/plot_scale.py scale.json scale.svg
"""

import json
import math
import re
import sys

AXES = ["Devices", "Layers", "Microbatches"]
KINDS = {"Evaluate": "#0072b2", "Simulate": "#d55e00"}
WIDTH, HEIGHT, LEFT, TOP = 300, 240, 60, 30


def read(path):
    """{(axis, kind): [(n, milliseconds), …]}"""
    points = {}
    with open(path, encoding="utf-8") as file:
        rows = json.load(file)["benchmarks"]
    for row in rows:
        match = re.fullmatch(r"BM_(\w+)<(\w+)>/(\d+)", row["name"])
        if not match:
            continue
        axis, kind, n = match.groups()
        key = (axis, kind)
        points.setdefault(key, []).append((int(n), row["cpu_time"]))
    return points


def panel(axis, points, x0):
    """One plot, logarithmic both ways."""
    own = {kind: points.get((axis, kind), []) for kind in KINDS}
    ns = [n for list_ in own.values() for n, _ in list_]
    times = [t for list_ in own.values() for _, t in list_]
    n_from, n_to = math.log10(min(ns)), math.log10(max(ns))
    t_from = math.floor(math.log10(min(times)))
    t_to = max(t_from + 1, math.ceil(math.log10(max(times))))

    def at(n, t):
        x = x0 + (math.log10(n) - n_from) / (n_to - n_from) * WIDTH
        y = TOP + HEIGHT - (math.log10(t) - t_from) / (t_to - t_from) * HEIGHT
        return x, y

    out = [f'<rect x="{x0}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" '
           'fill="none" stroke="#888"/>',
           f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 38}" '
           f'text-anchor="middle">{axis.lower()}</text>']
    for n in sorted(set(ns)):
        x, _ = at(n, 10**t_from)
        out.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" '
                   f'text-anchor="middle">{n}</text>')
    for power in range(t_from, t_to + 1):
        _, y = at(ns[0], 10**power)
        out.append(f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{y:.1f}" '
                   f'y2="{y:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" '
                   f'text-anchor="end">{10.0**power:g} ms</text>')
    for kind, color in KINDS.items():
        if not own[kind]:
            continue
        line = [at(n, t) for n, t in sorted(own[kind])]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        out.append(f'<polyline points="{path}" fill="none" '
                   f'stroke="{color}" stroke-width="2"/>')
        x, y = line[-1]
        out.append(f'<text x="{x - 4:.1f}" y="{y - 8:.1f}" fill="{color}" '
                   f'text-anchor="end">{kind.lower()}</text>')
    return out


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    points = read(sys.argv[1])
    step = WIDTH + LEFT + 30
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{3 * step}" '
           f'height="{TOP + HEIGHT + 60}" font-family="sans-serif" '
           'font-size="12"><rect width="100%" height="100%" fill="white"/>']
    for i, axis in enumerate(AXES):
        svg += panel(axis, points, LEFT + i * step)
    svg.append("</svg>")
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write("\n".join(svg) + "\n")


main()
