#!/usr/bin/env python3
"""Other planners' own cases under their own measurements: the plan that
Tessera finds, beside the plan that they report.

usage: tests/bench/peers.py TESSERA --peers DIR [--work DIR] [--proposals N]
           [CASE…]

DIR holds the measurements as their authors published them: aceso/
(microsoft/SuperScaler, branch Aceso, profiler/profiled-time-eurosys),
pipedream/ (msr-fiddle/pipedream, profiler/*/profiles), piper/
(msr-fiddle/piper, inputs), galvatron/ (PKU-DAIR/Hetu-Galvatron, hardware and
model profiles). Nothing of them is kept here: each case is converted to a
graph file of measured operators, a profile and a cluster file (docs/models.md,
"Layers that you have timed"), in --work or a temporary folder, and searched.
What is assumed of a case stands beside it. Prints a table in Markdown.
"""

import argparse
import csv
import json
import math
import os
import re
import resource
import subprocess
import tempfile
import time

MB = 2**20
SHARDS = 8  # what a measured operator's tensor parallelism may cut


# ---- files of Tessera's

class Job:
    """A graph of measured operators with its profile, under construction."""

    BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}

    def __init__(self, name, batch, dtype, device, seq_len=1):
        self.device = device
        self.graph = {"schema_version": 1, "name": name, "global_batch": batch,
                      "seq_len": seq_len, "dtype": dtype, "operators": [],
                      "blocks": [], "tensors": [], "nodes": []}
        self.rows = {}
        self.outputs = {}  # by tensor: elements a sample, whether shards cut it
        self.operators = {}

    def tensor(self, name, kind, shape, dtype=None, sample=True):
        row = {"name": name, "kind": "TENSOR_KIND_" + kind, "shape": shape,
               "dtype": dtype or self.graph["dtype"]}
        if sample:
            row["sample_dim"] = 0
        if kind == "WEIGHT":
            row["init"] = {"stddev": 0.02}
        self.graph["tensors"].append(row)

    def input(self, name, elements):
        self.tensor(name, "INPUT", [self.graph["global_batch"], elements])
        self.outputs[name] = (elements, False)

    def layer(self, name, block, inputs, output, times, params=0, split=False,
              kept=0, kept_whole=0, shards=1, exchanged=True, reads=True,
              reads_result=False):
        """A measured operator of its own.

        output: elements a sample, 0 for a loss; cut by shards where `split`.
        times: seconds, {(samples, ways of tensor parallelism): (forward,
        backward)}. params: elements. kept, kept_whole: bytes a sample that are
        kept for backward, cut by shards or not, besides the inputs where it
        reads these and the result where it reads that. exchanged: the times
        have tensor parallelism's exchanges in them.
        """
        batch = self.graph["global_batch"]
        if block not in self.graph["blocks"]:
            self.graph["blocks"].append(block)
        extent = {"b": batch, "t": shards}
        letters = iter("acdfgi")
        operands, names = [], []
        for tensor in inputs:
            elements, cut = self.outputs[tensor]
            letter = next(letters)
            extent[letter] = elements
            operands.append("bt" + letter if cut else "b" + letter)
            names.append(tensor)
        weights = []
        if params > 0:
            extent["p"] = math.ceil(params / shards)
            operands.append("tp" if shards > 1 else "p")
            weights.append(name + ".weight")
            self.tensor(weights[0], "WEIGHT",
                        [shards, extent["p"]] if shards > 1 else [extent["p"]],
                        sample=False)
        results, made = [], [name]
        if output > 0:
            extent["o"] = output
            results.append("bto" if split else "bo")
        else:
            results.append("")
        for letter, size, cut in (("m", kept, shards > 1),
                                  ("n", kept_whole, False)):
            elements = round(size / 4 / (shards if cut else 1))
            if elements > 0:
                extent[letter] = elements
                results.append("bt" + letter if cut else "b" + letter)
                made.append(f"{name}:{letter}")
        for k, (result, tensor) in enumerate(zip(results, made)):
            self.tensor(tensor, "ACTIVATION", [extent[c] for c in result],
                        "fp32" if k > 0 or not result else None,
                        result.startswith("b"))
        self.outputs[name] = (output, split)
        cuts = any("t" in side for side in operands + results)

        def text(left, right):
            seen = set()
            out = ""
            for i, side in enumerate(left + ["->"] + right):
                if side == "->":
                    out += side
                    continue
                if i > 0 and i != len(left) + 1:
                    out += ","
                for c in side:
                    out += c
                    if c not in "bt" and c not in seen:
                        out += "!"
                    seen.add(c)
            return out

        def extents(rule, samples, shards):
            order = []
            for c in rule:
                if c.isalpha() and c not in order:
                    order.append(c)
            return [samples if c == "b" else shards if c == "t" else extent[c]
                    for c in order]

        rule = text(operands, results)
        forward_only = [] if reads else list(range(len(inputs)))
        read = ([results[0]] if results[0] else []) + [
            o for k, o in enumerate(operands) if k not in forward_only
        ] + results[0 if reads_result else 1:]
        backward = text(read, operands)
        # Like operators are one.
        key = (rule, backward, tuple(sorted(extent.items())),
               tuple(sorted(times.items())))
        if key not in self.operators:
            operator = f"measured_{len(self.operators)}"
            self.operators[key] = operator
            samples, _ = sorted(times)[0]
            points = 1.0
            for value in extents(rule, samples, shards):
                points *= value
            # What the device computes at its peak of 10^12 a second in the time
            # measured: by these stages are cut evenly to begin with.
            per_point = [seconds * 1e12 / points for seconds in
                         times[sorted(times)[0]]]
            row = {"name": operator, "rule": rule,
                   "flops_per_point": per_point[0],
                   "backward_flops_per_point": per_point[1] / len(operands),
                   "backward_reads_result": reads_result,
                   "one_backward": True, "forward_operands": forward_only}
            if cuts and exchanged:
                row["exchanged"] = "t"
            self.graph["operators"].append(row)
            for (samples, ways), seconds in times.items():
                for kernel, of, value in ((operator, rule, seconds[0]),
                                          (operator + "_d", backward,
                                           seconds[1])):
                    self.row(kernel, value, of,
                             extents(of, samples, shards // ways))
        self.graph["nodes"].append({
            "name": name, "op": self.operators[key], "rule": rule,
            "operands": names + weights, "results": made, "block": block})

    def row(self, name, seconds, rule="", extents=(), ranks=1, nodes=1,
            payload=0, dtype=None):
        key = (name, rule, tuple(extents), ranks, nodes, payload)
        self.rows[key] = {
            "name": name,
            "dtype": dtype or ("fp32" if payload else self.graph["dtype"]),
            "device": self.device, "ranks": ranks, "nodes": nodes,
            "rule": rule, "extents": list(extents), "payload_bytes": payload,
            "median_seconds": max(seconds, 1e-9), "spread": 0, "samples": 1}

    def write(self, folder, loss, cluster):
        self.graph["loss"] = loss
        os.makedirs(folder, exist_ok=True)
        profile = {"schema_version": 1, "host": "published", "date":
                   "2026-11-23", "libraries": "", "ranks_at_once": 1,
                   "rows": list(self.rows.values())}
        for name, value in (("model", self.graph), ("profile", profile),
                            ("cluster", cluster)):
            with open(os.path.join(folder, name + ".json"), "w") as out:
                json.dump(value, out)
        return folder


def cluster(name, device, memory, nodes, per_node, intra, inter, streams=True,
            latency=5e-6):
    """Nodes whose devices meet in a switch, which meet in another."""
    source = "a peer's measurements"
    vertices, devices, links = [], [], []

    def vertex(kind, text):
        vertices.append({"kind": "VERTEX_KIND_" + kind, "name": text})
        return len(vertices) - 1

    def connect(a, b, kind):
        links.append({"from_vertex": a, "to_vertex": b, "link_type": kind})
        links.append({"from_vertex": b, "to_vertex": a, "link_type": kind})

    spine = vertex("SWITCH", "spine") if nodes > 1 else -1
    for node in range(nodes):
        switch = vertex("BRIDGE", f"node{node}.switch")
        for i in range(per_node):
            at = vertex("DEVICE", f"node{node}.gpu{i}")
            devices.append({"device_type": 0, "vertex": at, "node": node})
            connect(at, switch, 0)
        if nodes > 1:
            nic = vertex("NIC", f"node{node}.nic")
            connect(switch, nic, 1)
            connect(nic, spine, 1)
    return {
        "schema_version": 1, "name": name,
        "device_types": [{
            "name": device, "source": source, "memory_bytes": int(memory),
            "peak_fp32_flops_per_second": 1e12,
            "peak_fp16_flops_per_second": 1e12,
            "peak_bf16_flops_per_second": 1e12,
            "memory_bandwidth_bytes_per_second": 9e11,
            "compute_efficiency": 1, "memory_efficiency": 0.8,
            "launch_overhead_seconds": 5e-6, "concurrent_streams": streams}],
        "link_types": [
            {"name": "inside", "source": source, "latency_seconds": latency,
             "bandwidth_bytes_per_second": intra},
            {"name": "between", "source": source, "latency_seconds": latency,
             "bandwidth_bytes_per_second": inter}],
        "vertices": vertices, "devices": devices, "links": links,
        # Tessera's own but for gradients of the parameters' type.
        "stack": {"name": "peer", "source": source, "overlaps": True,
                  "optimizer_traffic": 1, "sustained": 1, "tensor_exposed": 1,
                  "kernel_traffic": 1, "memory": {"fp16_gradients": True}}}


def run(binary, verb, folder, *arguments):
    command = [binary, verb, "--model", folder + "/model.json", "--cluster",
               folder + "/cluster.json", "--profile", folder + "/profile.json",
               *arguments, "--json"]
    begin, cpu = time.time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        raise SystemExit(" ".join(command) + "\n" + done.stderr)
    took = time.time() - begin
    then = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = then.ru_utime + then.ru_stime - cpu.ru_utime - cpu.ru_stime
    return (json.loads(done.stdout), done.returncode == 0,
            f"{took:.1f} s, {busy:.1f} s of CPU")


def limit(args, seconds=None):
    """Of a search: seconds, or few proposals where starts are enough."""
    if seconds and not args.proposals:
        return ["--time-limit", str(seconds)]
    return ["--proposals", args.proposals or "8"]


def without(*names):
    return [word for name in names for word in ("--forbid", name)]


def strategy_of(found):
    return found["name"].replace(", with layers or weights of its own", " *")


# ---- PipeDream (Narayanan et al., SOSP 2019)

# Samples of the profiled minibatch, by the shapes of its inputs and states.
PIPEDREAM = {"vgg16": ("image_classification", 128),
             "resnet101": ("image_classification", None),
             "inception_v3": ("image_classification", None),
             "gnmt": ("translation", 32)}


def read_pipedream(path):
    nodes, inputs = {}, {}
    with open(path) as lines:
        for line in lines:
            parts = line.strip().split(" -- ")
            if line.startswith("\t"):
                inputs.setdefault(parts[1], []).append(parts[0])
                continue

            def field(name, text=parts[2]):
                value = re.search(name + r"=(\[[^]]*\]|[\d.]+)", text)[1]
                return [float(v) for v in value.strip("[]").split(";")]
            nodes[parts[0]] = {
                "text": parts[1],
                "forward": field("forward_compute_time")[0] / 1e3,
                "backward": field("backward_compute_time")[0] / 1e3,
                "bytes": max(field("activation_size")),
                "params": field("parameter_size")[0] / 4}
    return nodes, inputs


def pipedream(args, model):
    """Profiled graph, fp32, on PipeDream's cluster A: 4 servers of 4 V100 (16
    GB) that meet over PCIe (10 GB/s, assumed), 10 Gb/s between servers. A
    global batch of the profiled minibatch for each device, in steps that end
    with one update (PipeDream's own have none at their end); times of other
    microbatches in proportion, as PipeDream assumes. Backward reads what
    forward read."""
    family, batch = PIPEDREAM[model]
    nodes, inputs = read_pipedream(os.path.join(
        args.peers, "pipedream", "profiler", family, "profiles", model,
        "graph.txt"))
    if batch is None:  # of images of 3 channels
        first = next(n for n in nodes.values() if n["text"].startswith("Input"))
        side = {"resnet101": 224, "inception_v3": 299}[model]
        batch = round(first["bytes"] / 4 / 3 / side / side)
    devices = 16
    job = Job("pipedream-" + model, batch * devices, "fp32", "v100")

    # Kahn's order, by number.
    number = lambda name: int(re.sub(r"\D", "", name))
    waiting = {n: set(inputs.get(n, [])) for n in nodes}
    order = []
    while waiting:
        ready = min((n for n, needs in waiting.items() if not needs),
                    key=number)
        del waiting[ready]
        order.append(ready)
        for needs in waiting.values():
            needs.discard(ready)

    # What takes no time and has one source is that.
    source = {}
    kept = []
    for n in order:
        froms = []
        for i in inputs.get(n, []):
            if source[i] not in froms:
                froms.append(source[i])
        node = nodes[n]
        takes_time = node["forward"] + node["backward"] > 0
        if not takes_time and len(froms) == 1:
            source[n] = froms[0]
        elif not froms:  # data, with the time that it takes to load
            source[n] = n
            job.input(n, max(1, round(node["bytes"] / 4 / batch)))
        else:
            source[n] = n
            kept.append((n, froms))
    read = {i for _, froms in kept for i in froms}
    data = [t["name"] for t in job.graph["tensors"]]
    job.graph["tensors"] = [t for t in job.graph["tensors"]
                            if t["name"] in read]
    sinks = [n for n, _ in kept if n not in read]
    # A block ends where one activation goes on.
    last = {}
    for at, (n, froms) in enumerate(kept):
        for i in froms:
            last[i] = at
    for n in sinks:
        last[n] = len(kept)
    block, live = 0, set()
    for at, (n, froms) in enumerate(kept):
        node = nodes[n]
        job.layer(n, f"part{block}", froms,
                  max(1, round(node["bytes"] / 4 / batch)),
                  {(batch, 1): (node["forward"], node["backward"])},
                  params=node["params"])
        live = {t for t in live | {n} if last[t] > at and t not in data}
        if len(live) == 1:
            block += 1
    job.layer("loss", f"part{block}", sinks, 0, {(batch, 1): (1e-9, 1e-9)})
    folder = job.write(os.path.join(args.work, "pipedream-" + model), "loss",
                       cluster("4x4 v100", "v100", 16e9, 4, 4, 10e9, 1.25e9))
    found, fits, seconds = run(args.tessera, "search", folder, "--prefer",
                               "fastest", "--confirm", "0", *limit(args, 0.7))
    ddp = next(b for b in found["baselines"] if b["name"] == "DDP")
    return [f"PipeDream's {model}, batch {batch * devices}, 16 V100",
            "data parallelism " + text_of(ddp["step_time_s"])
            + ("" if ddp["feasible"] else " (does not fit)"),
            text_of(found["step_time_s"]), strategy_of(found),
            seconds]


def text_of(seconds):
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


# ---- Aceso (Liu et al., EuroSys 2024)

# Layers, devices, hosts, and a plan of its own search with what it predicts of
# it by its cost model: for each stage the operators, devices, ways of tensor
# parallelism, and which are recomputed; all at one sample (two) a microbatch.
ACESO = {
    "1_3B": {
        "layers": 24, "devices": 4, "hosts": 1,
        "reported": "101.18 s, measured 100.28 s",
        "predicted": 101.18, "microbatch": 1,
        "stages": [(79, 1, 1, [(5, 7), (18, 20), (31, 33)]), (84, 1, 1, []),
                   (84, 1, 1, []), (68, 1, 1, [])]},
    "13B": {
        "layers": 40, "devices": 32, "hosts": 4,
        "reported": "84.61 s, measured 86.57 s",
        "predicted": 84.78, "microbatch": 2,
        "stages": [
            (26, 2, 1, [(3, 7), (16, 20)]),
            (35, 2, 1, [(3, 7), (16, 20), (29, 33)]),
            (31, 2, 1, [(1, 3), (7, 11), (20, 24)]),
            (32, 2, 1, [(2, 6), (15, 19), (30, 32)]),
            (32, 2, 1, [(9, 13), (22, 26)]),
            (34, 2, 1, [(3, 7), (16, 20), (31, 33)]),
            (60, 4, 2, [(8, 12), (21, 25), (34, 38), (49, 51)]),
            (34, 2, 1, [(0, 4), (15, 17), (28, 30)]),
            (31, 2, 1, [(7, 9), (20, 22)]),
            (34, 2, 1, [(2, 4), (15, 17), (28, 30)]),
            (36, 2, 1, [(7, 9), (20, 22), (33, 35)]),
            (34, 2, 1, [(10, 12)]), (37, 2, 1, []), (38, 2, 1, []),
            (29, 2, 1, [])]}}
ACESO_BATCH = 1024
ACESO_MEMORY = 28000 * MB


def aceso_job(args, size, cuts=(), suffix=""):
    """Aceso's GPT of that size: 16 kinds of operators, timed at 1 to 8 samples
    on 1 to 8 ways of tensor parallelism, whose exchanges are in the times. A
    stage may begin at each half of a layer, and where `cuts` says. Kept is
    what Aceso counts as activations (get_memory_v3): each operator's result,
    of which the softmax writes its own over the scores, and masks; half as
    much again of the dropout's. 16 bytes a parameter. Aceso's reserve for the
    allocator, of what lives for a moment, is left out, since that is counted
    here."""
    case = ACESO[size]
    folder = os.path.join(args.peers, "aceso", "profiler",
                          "profiled-time-eurosys")
    table = {}
    for samples in (1, 2, 4, 8):
        for ways in (1, 2, 4, 8):
            with open(os.path.join(folder, f"gpt_{size}_mbs{samples}_tp{ways}"
                                           "_algo0.csv")) as rows:
                for row in csv.DictReader(rows):
                    kind = row.pop("op_name")
                    table.setdefault(kind, {})[samples, ways] = {
                        k: float(v) for k, v in row.items()}
    kinds = list(table)
    order = ([kinds[0]] + kinds[1:14] * case["layers"] + kinds[14:])
    job = Job("aceso-gpt-" + size, ACESO_BATCH, "fp16", "v100", 2048)
    job.input("features", 2048)
    last, behind = "features", ""
    for i, kind in enumerate(order):
        rows = table[kind]
        whole, cut = rows[1, 1], rows[1, 8]
        part = (i - 1) % 13
        layer = (i - 1) // 13
        block = ("embed" if i == 0 else
                 "head" if i > 13 * case["layers"] else
                 f"h.{layer}.attention" if part < 8 else f"h.{layer}.mlp")
        # The part behind a cut is a block of its own.
        if part in (0, 8) or i > 13 * case["layers"]:
            behind = ""
        if i in cuts and block in job.graph["blocks"]:
            behind = "'"
        block += behind
        name = ("embed" if i == 0 else f"{kind}.{layer}")
        activations = whole["activations"]
        is_loss = i + 1 == len(order)
        splits = cut["activations"] < 0.7 * activations
        split = splits and not is_loss
        result = 0 if is_loss else min(activations, whole["output_size"])
        kept = activations - result
        if kind == "enc-attention-dropout":
            kept += 0.5 * activations
        output = round(result * MB / 2 / (SHARDS if split else 1))
        params = whole["weights"] * MB / 2
        shards = (SHARDS if params > 0 or splits or job.outputs[last][1]
                  else 1)
        times = {at: (row["forward-compute"] / 1e6,
                      row["backward-compute"] / 1e6)
                 for at, row in rows.items() if shards > 1 or at[1] == 1}
        softmax = kind == "enc-attention-softmax"
        job.layer(name, block, [last], output, times, params=params,
                  split=split, kept=kept * MB if splits else 0,
                  kept_whole=0 if splits else kept * MB, shards=shards,
                  reads=not softmax, reads_result=softmax)
        last = name
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        for ranks in (2, 4, 8):
            with open(os.path.join(folder, f"prim_gpt_{size}_{name}_{ranks}"
                                           "gpus.csv")) as rows:
                for row in csv.reader(rows):
                    # 10^9 ms: it did not fit. Of an all-gather the file has
                    # what each rank sends.
                    if row[0][0].isdigit() and float(row[1]) < 1e6:
                        whole = ranks if name == "all_gather" else 1
                        job.row(name.replace("_", "-"), float(row[1]) / 1e3,
                                ranks=ranks,
                                payload=round(float(row[0]) * MB) * whole)
    bandwidth = {}
    for hosts, where in ((1, "intra"), (2, "inter")):
        with open(os.path.join(folder, f"p2p_{where}_node.csv")) as rows:
            sizes, rates = list(csv.reader(rows))[:2]
        for size_mb, rate in zip(sizes, rates):
            job.row("send-recv", float(size_mb) / 1024 / float(rate), ranks=2,
                    nodes=hosts, payload=int(float(size_mb) * MB))
        bandwidth[where] = float(rates[-1]) * 1e9
    folder = job.write(
        os.path.join(args.work, "aceso-" + size + suffix), last,
        cluster(f"{case['hosts']} hosts of v100", "v100",
                ACESO_MEMORY, case["hosts"],
                case["devices"] // case["hosts"], bandwidth["intra"],
                bandwidth["inter"]))
    return job, folder


def axes_of(letter, size):
    axes, prime = [], 2
    while size > 1:
        if size % prime == 0:
            axes.append({"name": f"{letter}{len(axes)}", "size": prime})
            size //= prime
        else:
            prime += 1
    return axes


def pipeline_plan(args, job, folder, stages, microbatches):
    """A plan of stages in order: (nodes, devices, ways of tensor parallelism,
    nodes that run again), 1F1B, on consecutive devices."""
    run(args.tessera, "simulate", folder, "--strategy",
        "pp=4", "--plan-out",
        os.path.join(folder, "start.json"))
    with open(os.path.join(folder, "start.json")) as text:
        plan = json.load(text)
    nodes = {node["name"]: node for node in job.graph["nodes"]}
    plan.update(schedule="1f1b", microbatches=microbatches, groups=[],
                placements=[], weights=[])
    device = 0
    for s, (names, devices, ways, again) in enumerate(stages):
        data, tensor = axes_of("d", devices // ways), axes_of("t", ways)
        plan["groups"].append({
            "name": f"stage{s}", "axes": data + tensor,
            "devices": list(range(device, device + devices))})
        device += devices
        for name in names:
            placement = {"nodes": [name], "group": f"stage{s}", "splits": []}
            if data:
                placement["splits"].append(
                    {"factor": "b", "axes": [a["name"] for a in data]})
            if tensor and "t" in nodes[name]["rule"]:
                placement["splits"].append(
                    {"factor": "t", "axes": [a["name"] for a in tensor]})
            if name in again:
                placement["recompute"] = True
            plan["placements"].append(placement)
    weights = [t["name"] for t in job.graph["tensors"]
               if t["kind"] == "TENSOR_KIND_WEIGHT"]
    plan["weights"] = [{"weights": weights}]
    path = os.path.join(folder, "peer.json")
    with open(path, "w") as out:
        json.dump(plan, out)
    return path


def aceso(args, size):
    case = ACESO[size]
    cuts = set()
    for operators, *_ in case["stages"]:
        cuts.add(max(cuts, default=0) + operators)
    job, folder = aceso_job(args, size, cuts, "-own")
    names = [node["name"] for node in job.graph["nodes"]]
    stages, first = [], 0
    for operators, devices, ways, again in case["stages"]:
        of_stage = names[first:first + operators]
        first += operators
        run_again = {of_stage[i] for begin, end in again
                     for i in range(begin, end)}
        stages.append((of_stage, devices, ways, run_again))
    plan = pipeline_plan(args, job, folder, stages,
                         ACESO_BATCH // case["microbatch"])
    own, fits, _ = run(args.tessera, "simulate", folder, "--plan", plan)
    _, folder = aceso_job(args, size)
    search = [args.tessera, "search", folder, "--prefer", "fastest",
              "--confirm", "0", *limit(args)]
    found, feasible, seconds = run(*search)
    plain, *_ = run(*search, *without("zero1", "zero2", "zero3"))
    return [f"Aceso's GPT-{size.replace('_', '.')}, batch {ACESO_BATCH}, "
            f"{case['devices']} V100 (28,000 MB)",
            f"{case['reported']}; a plan of its search, predicted "
            f"{case['predicted']} s, priced here {own['step_time_s']:.2f} s"
            + ("" if fits else " (does not fit)"),
            text_of(found["step_time_s"])
            + ("" if feasible else " (does not fit)")
            + f"; {text_of(plain['step_time_s'])} without ZeRO, as Aceso",
            strategy_of(found), seconds]


# ---- Galvatron (Miao et al., VLDB 2023; release 2.4.1)

def galvatron(args):
    """Llama2-7B, bf16, batch 64 of 2,048 tokens, 8 GPUs of one host (not
    named), 38 GB of which Galvatron leaves a fifth to the allocator. A layer's
    forward is timed at one sample, other numbers of samples and tensor
    parallelism in proportion, backward twice that (its "static" profile);
    tensor parallelism exchanges as in Megatron's sequence parallelism three
    times a half layer, two forward, each half a timed all-reduce. Its plan: pp
    2, tp 2, dp 2, ZeRO-2, 32 microbatches. Left out: that exchanges slow
    backward beside them by 13 %."""
    model = os.path.join(args.peers, "galvatron", "galvatron", "models", "gpt",
                         "configs")
    hardware = os.path.join(args.peers, "galvatron", "galvatron",
                            "profile_hardware", "hardware_configs")

    def read(*path):
        with open(os.path.join(*path)) as text:
            return json.load(text)

    times = read(model, "computation_profiling_bf16_llama2-7b_all.json")
    memory = read(model, "memory_profiling_bf16_llama2-7b_all.json")
    exchanges = read(hardware, "sp_time_1nodes_8gpus_per_node.json")
    rates = read(hardware, "allreduce_bandwidth_1nodes_8gpus_per_node.json")
    sends = read(hardware, "p2p_bandwidth_1nodes_8gpus_per_node.json")

    layer = times["layertype_0_bsz1_seq2048"] / 1e3
    other = times["layertype_other_bsz1_seq2048"] / 1e3
    of_layer = memory["layertype_0_sp"]["2048"]
    ends = memory["other_memory_pp_on_last_sp"]["2048"]
    kept = of_layer["tp_activation_per_bsz_dict"]
    stream = 2048 * 4096 * 2  # bytes a sample between layers

    def gather(samples, ways):
        if ways == 1:
            return 0
        size = samples * stream / MB
        sizes = [2**k for k in range(11)]
        times = [exchanges[f"allreduce_size_{ways}_{s}MB_time"] / 2e3
                 for s in sizes]
        k = min(max(1, next((i for i, s in enumerate(sizes) if s >= size), 10)),
                10)
        return times[k - 1] + (times[k] - times[k - 1]) * (
            size - sizes[k - 1]) / (sizes[k] - sizes[k - 1])

    def measured(seconds, forward, backward):
        return {(b, t): (seconds * b / t + forward * gather(b, t),
                         2 * seconds * b / t + backward * gather(b, t))
                for b in (1, 2, 4, 8, 16) for t in (1, 2, 4, 8)}

    job = Job("galvatron-llama2-7b", 64, "bf16", "gpu", 2048)
    job.input("features", 2048)
    last = "features"
    # 16 bytes a parameter.
    job.layer("embed", "embed", [last], stream // 2,
              {(b, 1): (1e-9, 1e-9) for b in (1, 16)},
              params=ends["model_states"]["1"] * MB / 16)
    last = "embed"
    for i in range(32):
        for half in ("attention", "mlp"):
            name = f"h.{i}.{half}"
            job.layer(name, f"h.{i}", [last], stream // 2,
                      measured(layer / 2, 2, 1),
                      params=of_layer["parameter_size"] * MB / 4 / 2,
                      kept=(kept["1"] * MB - 2 * stream) / 2, shards=SHARDS)
            last = name
    job.layer("head", "head", [last], 0, measured(other, 1, 1),
              params=ends["model_states"]["1"] * MB / 16,
              kept=ends["activation"]["1"] * MB - stream, shards=SHARDS)
    for ranks in (2, 4, 8):
        rate = min(v for k, v in rates.items()
                   if k.startswith(f"allreduce_size_{ranks}_"))
        for payload in (MB, 1024 * MB):
            seconds = 2 * (ranks - 1) / ranks * payload / MB / rate / 1e3
            for name, share in (("all-reduce", 1), ("all-gather", 0.5),
                                ("reduce-scatter", 0.5)):
                job.row(name, share * seconds, ranks=ranks, payload=payload)
    for payload in (MB, 1024 * MB):
        job.row("send-recv", payload / MB / sends["pp_size_2"] / 1e3, ranks=2,
                payload=payload)
    folder = job.write(os.path.join(args.work, "galvatron"), "head",
                       cluster("8 gpus", "gpu", 0.8 * 38 * 1024 * MB, 1, 8,
                               154e9, 154e9))
    own, fits, _ = run(args.tessera, "simulate", folder, "--strategy",
                       "tp=2,pp=2,dp=2,mbs=1,zero=2,schedule=1f1b")
    found, feasible, seconds = run(
        args.tessera, "search", folder, "--prefer", "fastest", "--confirm", "0",
        *limit(args))
    plain, *_ = run(args.tessera, "search", folder, "--prefer", "fastest",
                    "--confirm", "0", *limit(args), *without("zero3"))
    return ["Galvatron's Llama2-7B, batch 64, 8 GPUs",
            f"3.871 s, found in 147 s; priced here {own['step_time_s']:.2f} s"
            + ("" if fits else " (does not fit)"),
            text_of(found["step_time_s"])
            + ("" if feasible else " (does not fit)")
            + f"; {text_of(plain['step_time_s'])} without ZeRO-3",
            strategy_of(found), seconds]


# ---- Piper (Tarnawski et al., NeurIPS 2021)

# What Piper's own program finds: for each stage the layers, replicas, and
# layers that run again; 2.56113 ms a sample, by its count, which leaves out
# that a pipeline fills and drains.
PIPER_PLAN = [(7, 128, 6), (3, 48, 2)] + [(2, 32, 1)] * 4 + [
    (1, 16, 0), (1, 15, 0), (1, 15, 0), (3, 40, 0), (3, 40, 0), (7, 80, 0)]
PIPER_SECONDS = 2.56113e-3


def piper(args):
    """BERT-32 (32 layers of hidden size 3,840, fp32) on 512 A100 of 8 GiB,
    1,920 microbatches of Piper's "samples", 25 GiB/s from each device:
    algo.cpp, single(). A layer's time, of which a third is taken for forward,
    is given for 1, 2, 4 and 8 ways of tensor parallelism, whose exchanges are
    in it; the mask that all layers read travels with the activations. SGD,
    whose memory is Piper's: parameters and gradients. Piper's throughput is
    that of a pipeline that never empties; a step here fills and drains it."""
    with open(os.path.join(args.peers, "piper", "inputs",
                           "bert32a100.json")) as text:
        bert = json.load(text)
    job = Job("piper-bert-32", 1920, "fp32", "a100")
    chain = [n for n in bert["nodes"] if n["name"] != "tensor"]
    edges = {}
    for edge in bert["edges"]:
        edges[edge["destId"]] = (edges.get(edge["destId"], 0)
                                 + edge["communicationCost"])
    last = "features"
    job.input(last, round(edges[chain[0]["id"]] / 4))
    for node, behind in zip(chain, chain[1:] + [None]):
        of = {int(t): c[0] for t, c in node["TMPCs"].items()}
        out = edges[behind["id"]] if behind else 0
        times = {(1, t): (max(c["timePerSample"] / 3, 1e-9),
                          max(c["timePerSample"] * 2 / 3, 1e-9))
                 for t, c in of.items()}
        splits = of[2]["parameterSize"] < 0.7 * of[1]["parameterSize"]
        whole = 2 * of[2]["memoryUsageA"] - of[1]["memoryUsageA"]
        inputs = edges[node["id"]]
        job.layer(f"{node['name']}.{node['id']}".lower(),
                  f"part{node['id']}", [last], round(out / 4),
                  times if splits else {(1, 1): times[1, 1]},
                  params=of[1]["parameterSize"] / 4,
                  kept=(of[1]["memoryUsageA"] - whole) if splits else 0,
                  kept_whole=max(0, (whole if splits else
                                     of[1]["memoryUsageA"]) - inputs),
                  shards=SHARDS if splits else 1)
        last = job.graph["nodes"][-1]["name"]
    rate = 25 * 2**30
    folder = job.write(os.path.join(args.work, "piper"), last,
                       cluster("512 a100", "a100", 8 * 2**30, 64, 8, rate,
                               8 * rate))
    names = [node["name"] for node in job.graph["nodes"]]
    stages, first = [], 0
    for layers, replicas, again in PIPER_PLAN:
        of_stage = names[first:first + layers]
        first += layers
        stages.append((of_stage, replicas, 1,
                       [n for n in of_stage if "transformer" in n][:again]))
    own, fits, _ = run(args.tessera, "simulate", folder, "--optimizer", "sgd",
                       "--plan", pipeline_plan(args, job, folder, stages, 15))
    found, feasible, seconds = run(
        args.tessera, "search", folder, "--optimizer", "sgd", "--prefer",
        "fastest", "--confirm", "0", *limit(args))
    bubble = found["breakdown"]["bubble"]
    return ["Piper's BERT-32, 1,920 microbatches, 512 A100 (8 GiB)",
            f"{1920 * PIPER_SECONDS:.2f} s in a pipeline that never empties; "
            f"as a step {own['step_time_s']:.2f} s"
            + ("" if fits else " (does not fit)"),
            text_of(found["step_time_s"])
            + ("" if feasible else " (does not fit)")
            + f", {bubble:.2f} s of it filling and draining",
            strategy_of(found), seconds]


CASES = {**{"pipedream-" + m: lambda args, m=m: pipedream(args, m)
            for m in PIPEDREAM},
         **{"aceso-" + s: lambda args, s=s: aceso(args, s) for s in ACESO},
         "piper": piper, "galvatron": galvatron}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tessera")
    parser.add_argument("cases", nargs="*", metavar="CASE",
                        help=", ".join(CASES))
    parser.add_argument("--peers", required=True, metavar="DIR")
    parser.add_argument("--work", metavar="DIR")
    parser.add_argument("--proposals", metavar="N",
                        help="of each search, in place of its own limit")
    args = parser.parse_intermixed_args()
    for case in args.cases:
        if case not in CASES:
            parser.error(f"unknown case '{case}'; known: {', '.join(CASES)}")
    print("| case | the peer's plan | Tessera's plan | what it is | search |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        args.work = args.work or folder
        for case in args.cases or CASES:
            print("| " + " | ".join(CASES[case](args)) + " |", flush=True)


if __name__ == "__main__":
    main()
