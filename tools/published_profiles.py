#!/usr/bin/env python3
"""Writes profiles of GPUs from published measurements.

  tools/published_profiles.py OPERATORS COLLECTIVES -o profiler/profiles

OPERATORS and COLLECTIVES are the folders of tables that tools/fit_kernels.py and
tools/fit_collectives.py read. Of each GPU's 16-bit matrix products 600 are
taken, half of them of training sizes; of its collectives among the GPUs of one
host every fourth size. Needs NumPy.
"""

import argparse
import datetime
import pathlib

import numpy as np

import fit_collectives
import fit_kernels

PRODUCTS = 600

ORIGINS = {
    "aiconfigurator": ("published: ai-dynamo/aiconfigurator (Apache-2.0)",
                       "TensorRT-LLM (products; version not stated), NCCL 2.27.3"),
    "vidur": ("published: microsoft/vidur (MIT)", "PyTorch's products, fp16"),
}
# The collective tables' names of GPUs; kinds by CommKind.
SYSTEMS = {**fit_kernels.AICONFIGURATOR, "b300_sxm": "b300-sxm-288gb",
           "gb300": "gb300-288gb"}
KINDS = {"all_reduce": "all-reduce", "all_gather": "all-gather",
         "reduce_scatter": "reduce-scatter", "alltoall": "all-to-all"}


def key(name, dtype, device, ranks):
    return (f'rows {{ name: "{name}" dtype: "{dtype}" device: "{device}" '
            f"ranks: {ranks} nodes: 1\n       ")


def products(table):
    """Text of each, by shape; of two of one shape the last."""
    t = fit_kernels.sample(table, PRODUCTS, np.random.default_rng(2))
    rows = {tuple(map(int, shape)): seconds for *shape, seconds in zip(
        t.batch, t.m, t.k, t.n, t.seconds)}
    dtype = "fp16" if table.source == "vidur" else "bf16"
    return [key("product", dtype, table.device, 1) +
            f'rule: "bmk,bnk->bmn" extents: {list(shape)}\n       '
            f"median_seconds: {rows[shape]:.5g} samples: 1 }}"
            for shape in sorted(rows)]


def collectives(rows):
    texts = {}
    for row in rows:
        if not row.source.startswith("aiconfigurator") or row.hosts > 1 or \
                row.kind not in KINDS or row.size.bit_length() % 2:
            continue
        device = SYSTEMS[row.system]
        texts.setdefault(device, {})[KINDS[row.kind], row.local, row.size] = (
            key(KINDS[row.kind], "fp32", device, row.local) +
            f"payload_bytes: {row.size} median_seconds: {row.us * 1e-6:.5g} samples: 1 }}")
    return {device: [rows[k] for k in sorted(rows)]
            for device, rows in texts.items()}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("operators")
    parser.add_argument("collectives", type=pathlib.Path)
    parser.add_argument("-o", dest="output", type=pathlib.Path, required=True)
    args = parser.parse_args()
    exchanges = collectives(fit_collectives.read(args.collectives))
    texts = {}
    for table in fit_kernels.read_products(args.operators):
        if table.source in ORIGINS and table.kind == "16bit":
            texts[table.device] = (table.source, products(table))
    for device in exchanges:
        texts.setdefault(device, ("aiconfigurator", []))
    args.output.mkdir(exist_ok=True)
    for device, (source, rows) in sorted(texts.items()):
        host, libraries = ORIGINS[source]
        rows += exchanges.get(device, [])
        (args.output / f"{device}.txtpb").write_text(
            "# Written by tools/published_profiles.py; do not edit.\n"
            f'schema_version: 1\nhost: "{host}"\n'
            f'date: "{datetime.date.today()}"\nlibraries: "{libraries}"\n'
            "ranks_at_once: 1\n" + "\n".join(rows) + "\n")
        print(f"{device}: {len(rows)} rows")


if __name__ == "__main__":
    main()
