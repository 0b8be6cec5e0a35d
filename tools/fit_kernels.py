#!/usr/bin/env python3
"""Fits the constants of costmodel/source/kernel_time to measured kernels.

  tools/fit_kernels.py OPERATORS [--write costmodel/source]
      [--grid tests/testdata/published] [--no-hold-out]

OPERATORS is a folder of published tables (columns below):
  aiconfigurator_gemm_bf16.csv.gz  system, m, n, k, ms
  vidur_gemm_fp16.csv.gz           gpu, m, n, k, median_ms
  gemm_throughput.csv.gz           gpu, dtype, layout, batch, m, n, k, tflops
  attention_kernels.csv, aiconfigurator_context_attention.csv.gz

Prints the errors of the fit by source and device; those of each source and
each device when it is held out; writes with --write the constants into
*_constants.inc, and with --grid thinned tables for the tests. What
is fitted are the constants of a GPU generation, and of a device no more than
the rate of its large products, which planner/topology/hardware.cc states.
"""

import argparse
import collections
import csv
import gzip
import os
import re

import numpy as np

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

Device = collections.namedtuple(
    "Device", "name generation sms bandwidth fp32 fp16 fp8 efficiency")
# Products of one source on one device. `weight` is that of each in a fit.
Table = collections.namedtuple(
    "Table", "source device kind m n k batch out_bytes seconds")


def read_devices():
  """The rows of planner/topology/hardware.cc."""
  text = open(os.path.join(ROOT, "planner/topology/hardware.cc")).read()
  constants = {}
  for name, value in re.findall(r"constexpr double (k\w+) = ([\d./ ]+);", text):
    constants[name] = eval(value)  # a quotient of two numbers
  rows = re.findall(
      r'\{"([a-z0-9-]+)",(?:(?!\{").)*?\bk(Pascal|Volta|Turing|Ampere|Ada|'
      r'Hopper|Blackwell),([^}]*)\}', text, re.S)
  devices = {}
  for name, generation, figures in rows:
    f = [x.strip() for x in figures.split(",")]
    efficiency = constants[f[8]] if f[8] in constants else eval(f[8])
    devices[name] = Device(name, generation, int(f[0]), float(f[2]) * 1e9,
                           float(f[4]) * 1e12, float(f[6]) * 1e12,
                           float(f[7]) * 1e12, efficiency)
  return devices


def read(folder, name):
  path = os.path.join(folder, name)
  with (gzip.open(path, "rt") if path.endswith("gz") else open(path)) as file:
    yield from csv.DictReader(file)


AICONFIGURATOR = {
    "a100_sxm": "a100-sxm4-80gb", "h100_sxm": "h100-sxm5-80gb",
    "h200_sxm": "h200-sxm5-141gb", "b200_sxm": "b200-sxm-180gb",
    "gb200": "gb200-186gb", "l40s": "l40s-48gb"}
# Vidur's A100 and H100 are those of pairs with an NVLink bridge: PCIe cards.
VIDUR = {"a100": "a100-pcie-80gb", "h100": "h100-nvl-94gb", "a40": "a40-48gb"}
THROUGHPUT = {
    "A100-PCIe-80GB": "a100-pcie-80gb", "B200-SXM": "b200-sxm-180gb",
    "V100": "v100-sxm2-16gb", "T4": "t4-16gb", "P100": "p100-sxm2-16gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb", "Tesla T4": "t4-16gb",
    "Tesla P100-PCIE-16GB": "p100-pcie-16gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb"}
SOURCES = {"MooreThreads": "simumax", "baidu-research": "deepbench",
           "sitar-lab": "neusight"}


def read_products(folder):
  rows = collections.defaultdict(list)
  for r in read(folder, "aiconfigurator_gemm_bf16.csv.gz"):
    rows["aiconfigurator", AICONFIGURATOR[r["system"]], "16bit"].append(
        (int(r["m"]), int(r["n"]), int(r["k"]), 1, 2, float(r["ms"]) * 1e-3))
  for r in read(folder, "vidur_gemm_fp16.csv.gz"):
    rows["vidur", VIDUR[r["gpu"]], "16bit"].append(
        (int(r["m"]), int(r["n"]), int(r["k"]), 1, 2,
         float(r["median_ms"]) * 1e-3))
  for r in read(folder, "gemm_throughput.csv.gz"):
    source = SOURCES.get(r["source"].split("/")[0])
    if source is None or r["gpu"] not in THROUGHPUT or not r["m"]:
      continue
    if r["op"].startswith("grouped"):
      continue
    kind = "fp32" if r["dtype"] == "fp32" else "16bit"
    batch = int(r["batch"] or 1)
    shape = (int(r["m"]), int(r["n"]), int(r["k"]))
    operations = 2.0 * batch * np.prod(shape, dtype=float)
    seconds = (float(r["time_us"]) * 1e-6 if r["time_us"] else
               operations / (float(r["tflops"]) * 1e12))
    out = 4 if kind == "fp32" or r["out_dtype"] == "fp32" else 2
    rows[source, THROUGHPUT[r["gpu"]], kind].append(
        shape + (batch, out, seconds))
  tables = []
  for (source, device, kind), values in rows.items():
    a = np.array(values, float)
    tables.append(Table(source, device, kind, *a.T))
  return tables


# ---- The model: costmodel/source/kernel_time.cc in numpy --------------------

TILES = [(256, 128, 0), (128, 256, 0), (128, 128, 1), (128, 64, 2),
         (64, 128, 2), (64, 64, 3), (64, 32, 4), (32, 64, 4)]
SPLITS = [1, 2, 4, 8, 16]
DEPTH = 64
SAG_SECONDS = 2e-3

# Constants of a generation: start, least, most.
CONSTANTS = [
    ("headroom", 1.03, 0.3, 1.3),
    # The rate of each class of tiles over that of the next larger.
    ("rate128", 0.95, 0.4, 1.0),
    ("rate64", 0.9, 0.4, 1.0),
    ("rate64x64", 0.85, 0.4, 1.0),
    ("rate32", 0.65, 0.3, 1.0),
    ("prologue_us", 1.0, 0.0, 10.0),
    ("floor_us", 2.3, 0.1, 10.0),
    ("memory", 0.85, 0.3, 1.0),
    ("waves", 0.5, 0.0, 1.0),
    ("split_us", 2.0, 0.0, 10.0),
    ("sag", 0.03, 0.0, 0.3),
]
NAMES = [c[0] for c in CONSTANTS]
START = np.array([c[1] for c in CONSTANTS])
LEAST = np.array([c[2] for c in CONSTANTS])
MOST = np.array([c[3] for c in CONSTANTS])


def rates_of(c):
  return np.cumprod([1.0, c["rate128"], c["rate64"], c["rate64x64"],
                     c["rate32"]])


def predict(p, device, kind, m, n, k, batch, out_bytes):
  """Seconds of products; p in the order of CONSTANTS."""
  c = dict(zip(NAMES, p))
  in_bytes = 4 if kind == "fp32" else 2
  peak = device.fp32 if kind == "fp32" else device.fp16
  rate = peak * min(1.0, device.efficiency * c["headroom"]) / device.sms
  rates = rates_of(c)
  bandwidth = device.bandwidth * c["memory"]
  traffic = batch * (in_bytes * (m * k + n * k) + out_bytes * m * n)
  best = np.full(np.shape(m), np.inf)
  for tm, tn, width in TILES:
    tiles = batch * np.ceil(m / tm) * np.ceil(n / tn)
    per_k = 2.0 * tm * tn / (rate * rates[width])
    for split in SPLITS:
      depth = np.ceil(np.ceil(k / split) / DEPTH) * DEPTH
      busy = tiles * split / device.sms
      waves = c["waves"] * np.ceil(busy) + (1 - c["waves"]) * np.maximum(
          busy, 1)
      compute = waves * (depth * per_k + c["prologue_us"] * 1e-6)
      compute *= 1 + c["sag"] * compute / (compute + SAG_SECONDS)
      memory = traffic / bandwidth
      if split > 1:
        memory = memory + 4 * split * batch * m * n / bandwidth
      cubes = compute**3 + memory**3
      seconds = np.cbrt(cubes)
      if split > 1:
        seconds = seconds + c["split_us"] * 1e-6
      best = np.minimum(best, seconds)
  return best + c["floor_us"] * 1e-6


# ---- Fused attention --------------------------------------------------------

# Calls of one kernel; `direction` is fwd, bwd or fwd+bwd.
Attention = collections.namedtuple(
    "Attention", "source device kernel direction causal batch heads kv_heads "
    "length qk_width v_width seconds")

ATTENTION_GPUS = {
    "A100-80GB-SXM4": "a100-sxm4-80gb", "H100-80GB-SXM5": "h100-sxm5-80gb",
    "A100-PCIe-80GB": "a100-pcie-80gb", "B200-SXM": "b200-sxm-180gb"}
ATTENTION_KERNELS = {
    "FlashAttention": "kFlash1", "FlashAttention-2": "kFlash2",
    "FlashAttention-3": "kFlash3", "cuDNN": "kCudnn"}


def read_attention(folder):
  """SimuMax counts all pairs of queries and keys of causal attention, the
  FlashAttention repository half of them; both count 2.5 times the forward
  operations for backward."""
  rows = collections.defaultdict(list)
  for r in read(folder, "attention_kernels.csv"):
    device = ATTENTION_GPUS[r["gpu"]]
    simumax = r["source"].startswith("MooreThreads")
    if simumax:
      kernel = "kFlash2" if device.startswith("a100") else "kCudnn"
    elif r["impl"] in ATTENTION_KERNELS:
      kernel = ATTENTION_KERNELS[r["impl"]]
    else:
      continue
    batch, heads = int(r["batch"]), int(r["heads"])
    length, widths = int(r["seq_q"]), (int(r["qk_dim"]), int(r["v_dim"]))
    causal = r["causal"].startswith("yes")
    operations = 2.0 * batch * heads * length**2 * sum(widths)
    if causal and not simumax:
      operations /= 2
    operations *= {"fwd": 1, "bwd": 2.5, "fwd+bwd": 3.5}[r["direction"]]
    source = "simumax" if simumax else "flash-attention"
    rows[source, device, kernel, r["direction"], causal].append(
        (batch, heads, int(r["kv_heads"] or heads), length, *widths,
         operations / (float(r["tflops"]) * 1e12)))
  for r in read(folder, "aiconfigurator_context_attention.csv.gz"):
    if (r["attn_dtype"], r["kv_cache_dtype"], r["window_size"]) != (
        "bfloat16", "bfloat16", "0"):
      continue
    batch, length, heads, kv_heads, width = (
        int(r[x]) for x in ("batch_size", "isl", "num_heads",
                            "num_key_value_heads", "head_dim"))
    device = AICONFIGURATOR[r["system"]]
    # Its times hold the writing of the cache for keys and values: only large
    # calls say something of the kernel.
    if 4.0 * batch * heads * length**2 * width < 4e12:
      continue
    kernel = "kFlash2" if device.startswith("a100") else "kCudnn"
    rows["aiconfigurator", device, kernel, "fwd", True].append(
        (batch, heads, kv_heads, length, width, width,
         float(r["latency"]) * 1e-3))
  return [Attention(*key, *np.array(values, float).T)
          for key, values in rows.items()]


# Constants of a kernel on a generation: start, least, most.
ATTENTION = [
    ("forward", 0.6, 0.02, 1.4),
    ("backward", 0.5, 0.02, 1.4),
    ("half_width", 20, 0, 200),
    ("prologue_keys", 100, 0, 1000),
]
ROWS = 128  # queries of one block
FLOOR = 3e-6


def attention_seconds(p, device, t):
  forward, backward, half_width, prologue = p
  width = (t.qk_width + t.v_width) / 2
  blocks = t.batch * t.heads * np.ceil(t.length / ROWS)
  keys = np.minimum((t.length + 1) / 2 + ROWS / 2,
                    t.length) if t.causal else t.length
  seconds = 0
  for direction in t.direction.split("+"):
    products, reach = (1, forward) if direction == "fwd" else (2.5, backward)
    rate = device.fp16 * np.minimum(
        1, device.efficiency * reach * width / (width + half_width))
    per_key = 4 * ROWS * width * products / (rate / device.sms)
    mean = blocks / device.sms * (keys + prologue) * per_key
    longest = (t.length + prologue) * per_key
    traffic = 2 * t.batch * t.length * (t.heads + t.kv_heads) * 2 * width * (
        1 if direction == "fwd" else 2)
    memory = traffic / (device.bandwidth * 0.8)
    seconds = seconds + FLOOR + np.cbrt(mean**3 + longest**3 + memory**3)
  return seconds


# The rate of backward over that of forward where no table has them apart:
# FlashAttention-2's on Hopper.
BACKWARD = 0.88


def fit_attention(tables, devices):
  directions = {t.direction for t in tables}
  apart = "bwd" in directions or directions == {"fwd", "fwd+bwd"}
  least = np.array([c[2] for c in ATTENTION])
  most = np.array([c[3] for c in ATTENTION])

  def loss(x):
    p = np.clip(x, least, most)
    outside = np.maximum(least - x, 0) + np.maximum(x - most, 0)
    if not apart:
      p[1] = p[0] * BACKWARD
    e = [np.mean(np.minimum(0.6, np.abs(np.log(
        attention_seconds(p, devices[t.device], t) / t.seconds))))
         for t in tables]
    return np.mean(e) * (1 + 10 * np.sum(outside / most))

  x = np.array([c[1] for c in ATTENTION], float)
  for _ in range(4):
    x = np.clip(nelder_mead(loss, x, 0.2 * np.abs(x) + 0.01, 200), least, most)
  if not apart:
    x[1] = x[0] * BACKWARD
  return x


def attention_fitted_on(group):
  """Not aiconfigurator's A100, whose kernel is none of these."""
  return [t for t in group
          if (t.source, t.kernel) != ("aiconfigurator", "kFlash2")]


def fit_all_attention(folder, devices, hold_out):
  """Rows of AttentionConstants, and the tables."""
  groups = collections.defaultdict(list)
  tables = read_attention(folder)
  for t in tables:
    groups[t.kernel, devices[t.device].generation].append(t)
  rows = []
  for (kernel, generation), group in groups.items():
    kept = attention_fitted_on(group)
    p = fit_attention(kept, devices)
    source = ", ".join(sorted({t.source + " " + t.device for t in kept}))
    print("\n%s %s: %s" % (kernel, generation, " ".join(
        "%s=%.3g" % (c[0], x) for c, x in zip(ATTENTION, p))))
    rows.append("    // %s\n    {AttentionKernel::%s, GpuGeneration::k%s, "
                "%.3f, %.3f, %.1f, %.1f},\n" % (source, kernel, generation, *p))
    for t in group:
      def show(name, p):
        e = attention_seconds(p, devices[t.device], t) / t.seconds - 1
        print("%-40s %-7s %-8s n %5d med %5.1f%% mean %5.1f%% bias %+5.1f%%" % (
            name, t.direction, "causal" if t.causal else "full", len(e),
            100 * np.median(np.abs(e)), 100 * np.mean(np.abs(e)),
            100 * np.median(e)), flush=True)
      show(t.source + " " + t.device, p)
      if not hold_out:
        continue
      for what in ("source", "device"):
        others = [o for o in kept if getattr(o, what) != getattr(t, what)]
        if others:
          show("  without this " + what, fit_attention(others, devices))
  return rows, tables


# ---- Fitting ----------------------------------------------------------------

def nelder_mead(f, start, step, iterations):
  simplex = [start] + [start + np.eye(len(start))[i] * step[i]
                       for i in range(len(start))]
  values = [f(x) for x in simplex]
  for _ in range(iterations):
    order = np.argsort(values, kind="stable")
    simplex = [simplex[i] for i in order]
    values = [values[i] for i in order]
    centre = np.mean(simplex[:-1], 0)
    there = centre + (centre - simplex[-1])
    value = f(there)
    if value < values[0]:
      further = centre + 2 * (centre - simplex[-1])
      better = f(further)
      simplex[-1], values[-1] = (further, better) if better < value else (
          there, value)
    elif value < values[-2]:
      simplex[-1], values[-1] = there, value
    else:
      nearer = centre + 0.5 * (simplex[-1] - centre)
      value = f(nearer)
      if value < values[-1]:
        simplex[-1], values[-1] = nearer, value
      else:
        simplex = [simplex[0]] + [simplex[0] + 0.5 * (x - simplex[0])
                                  for x in simplex[1:]]
        values = [values[0]] + [f(x) for x in simplex[1:]]
  return simplex[int(np.argmin(values))]


def training_sizes(t):
  return (t.m >= 256) & (t.n >= 256) & (t.k >= 256)


def sample(t, count, rng):
  """Evenly over the training sizes, a quarter as dense over the rest."""
  weight = np.where(training_sizes(t), 1.0, 0.25)
  index = rng.choice(len(t.m), min(count, len(t.m)), replace=False,
                     p=weight / weight.sum())
  return t._replace(**{f: getattr(t, f)[index] for f in
                       ("m", "n", "k", "batch", "out_bytes", "seconds")})


def fit(tables, devices, start=START, fixed=(), count=1200, iterations=260):
  """Constants with the least mean |log(predicted / measured)|, each table
  counting alike, no product more than a factor of 1.8."""
  rng = np.random.default_rng(0)
  samples = [sample(t, count, rng) for t in tables]
  free = [i for i, name in enumerate(NAMES) if name not in fixed]

  def loss(x):
    p = start.copy()
    p[free] = x
    outside = np.maximum(LEAST - p, 0) + np.maximum(p - MOST, 0)
    p = np.clip(p, LEAST, MOST)
    total = 0
    for t in samples:
      e = np.abs(np.log(predict(p, devices[t.device], t.kind, t.m, t.n, t.k,
                                t.batch, t.out_bytes) / t.seconds))
      total += np.mean(np.minimum(e, 0.6))
    return total / len(samples) * (1 + 10 * outside.sum())

  p = start.copy()
  for _ in range(3):
    x = p[free]
    x = nelder_mead(loss, x, np.where(x > 0, 0.15 * np.abs(x), 0.1),
                    iterations)
    p[free] = x
    p = np.clip(p, LEAST, MOST)
  return p


def errors(p, t, devices):
  device = devices[t.device]
  r = predict(p, device, t.kind, t.m, t.n, t.k, t.batch, t.out_bytes)
  return r / t.seconds - 1


def describe(name, e, t):
  w = training_sizes(t)
  operations = 2 * t.batch * t.m * t.n * t.k
  text = "%-46s n %6d med %5.1f%% | training sizes n %6d med %5.1f%% mean %5.1f%% bias %+5.1f%% |" % (
      name, len(e), 100 * np.median(np.abs(e)), w.sum(),
      100 * np.median(np.abs(e[w])), 100 * np.mean(np.abs(e[w])),
      100 * np.median(e[w]))
  for low, high in ((0, 1e9), (1e9, 1e10), (1e10, 1e11), (1e11, 1e12),
                    (1e12, 1e16)):
    q = (operations >= low) & (operations < high)
    if q.any():
      text += " %.0e %+.0f%%" % (low, 100 * np.median(e[q]))
  return text


def fitted_on(group):
  """What a generation is fitted to: not vidur's short kernels, whose times are
  of whole microseconds and hold more than the kernel; not SimuMax's B200, whose
  products run under the load of a whole step (see print_load)."""
  kept = []
  for t in group:
    if t.source == "simumax" and t.device == "b200-sxm-180gb":
      continue
    if t.source == "vidur":
      long = t.seconds >= 50e-6
      t = t._replace(**{f: getattr(t, f)[long] for f in
                        ("m", "n", "k", "batch", "out_bytes", "seconds")})
    kept.append(t)
  return kept


def print_load(p, tables, devices):
  """How much longer products under the load of a whole step take than the fit,
  which is that of a rested device: sustained_rate in hardware.cc."""
  p = p.copy()
  p[NAMES.index("sag")] = 0
  for t in tables:
    if t.source == "simumax" and t.device == "b200-sxm-180gb":
      slower = 1 / (1 - np.median(-errors(p, t, devices)))
      print("%s %s under load: %.3f times as long" % (t.source, t.device, slower))


def row_of(generation, kind, p, source):
  c = dict(zip(NAMES, p))
  rates = rates_of(c)
  return ("    // %s\n    {GpuGeneration::k%s, %s, %.3f, {1, %.3f, %.3f, %.3f, "
          "%.3f}, %.3fe-6, %.3fe-6,\n     %.3f, %.3f, %.3fe-6, %.3f},\n"
          % (source, generation, "true" if kind == "fp32" else "false",
             c["headroom"], *rates[1:], c["prologue_us"], c["floor_us"], c["memory"],
             c["waves"], c["split_us"], c["sag"]))


def write_grid(path, tables):
  """At most 120 products of each table, evenly by training_sizes()."""
  rng = np.random.default_rng(1)
  with open(path, "w") as file:
    file.write("source,device,type,m,n,k,batch,result_bytes,us\n")
    for t in tables:
      s = sample(t, 120, rng)
      for m, n, k, batch, out, seconds in zip(s.m, s.n, s.k, s.batch,
                                              s.out_bytes, s.seconds):
        file.write("%s,%s,%s,%d,%d,%d,%d,%d,%.5g\n" % (
            t.source, t.device, t.kind, m, n, k, batch, out, seconds * 1e6))


def write_attention_grid(path, tables):
  rng = np.random.default_rng(1)
  with open(path, "w") as file:
    file.write("source,device,kernel,direction,causal,batch,heads,kv_heads,"
               "length,qk_width,v_width,us\n")
    for t in tables:
      index = rng.choice(len(t.length), min(60, len(t.length)), replace=False)
      for i in sorted(index):
        file.write("%s,%s,%s,%s,%d,%d,%d,%d,%d,%d,%d,%.5g\n" % (
            t.source, t.device, t.kernel, t.direction, t.causal, t.batch[i],
            t.heads[i], t.kv_heads[i], t.length[i], t.qk_width[i],
            t.v_width[i], t.seconds[i] * 1e6))


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("operators")
  parser.add_argument("--write")
  parser.add_argument("--grid")
  parser.add_argument("--no-hold-out", action="store_true")
  args = parser.parse_args()
  devices = read_devices()
  tables = read_products(args.operators)
  groups = collections.defaultdict(list)
  for t in tables:
    operations = 2 * t.batch * t.m * t.n * t.k
    large = operations >= 1e11
    if large.any():
      rate = np.median((operations / t.seconds)[large])
      d = devices[t.device]
      print("%-15s %-16s %-5s %6d products, large ones %6.1f TFLOP/s, %.3f of "
            "the peak" % (t.source, t.device, t.kind, len(t.m), rate / 1e12,
                          rate / (d.fp32 if t.kind == "fp32" else d.fp16)))
    groups[devices[t.device].generation, t.kind].append(t)
  written = "// Written by tools/fit_kernels.py; do not edit. In the order of %s.\n"
  rows = [written % "MatmulConstants"]
  for (generation, kind), group in groups.items():
    kept = fitted_on(group)
    p = fit(kept, devices)
    source = ", ".join(sorted({t.source + " " + t.device for t in kept}))
    print("\n%s %s: %s" % (generation, kind, " ".join(
        "%s=%.3g" % x for x in zip(NAMES, p))))
    print_load(p, group, devices)
    rows.append(row_of(generation, kind, p, source))
    if (generation, kind) == ("Ampere", "fp32"):
      for later in ("Ada", "Hopper", "Blackwell"):
        rows.append(row_of(later, kind, p, "as Ampere's, no table"))
    for t in group:
      print(describe(t.source + " " + t.device, errors(p, t, devices), t),
            flush=True)
  attention_rows, attention_tables = fit_all_attention(
      args.operators, devices, not args.no_hold_out)
  if args.write:
    for name, lines in (("matmul", rows),
                        ("attention", [written % "AttentionConstants"] +
                         attention_rows)):
      with open(os.path.join(args.write, name + "_constants.inc"),
                "w") as file:
        file.writelines(lines)
  if args.grid:
    write_grid(os.path.join(args.grid, "matmul.csv"), tables)
    write_attention_grid(os.path.join(args.grid, "attention.csv"),
                         attention_tables)
  if args.no_hold_out:
    return
  print("\nHeld out:")
  for group in groups.values():
    for t in group:
      for what in ("source", "device"):
        others = [o for o in fitted_on(group)
                  if getattr(o, what) != getattr(t, what)]
        if others:
          name = "%s %s without this %s" % (t.source, t.device, what)
          print(describe(name, errors(fit(others, devices), t, devices), t),
                flush=True)


if __name__ == "__main__":
  main()
