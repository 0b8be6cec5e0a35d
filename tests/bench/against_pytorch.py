#!/usr/bin/env python3
"""Trains the same models by Tessera and by PyTorch, on this machine.

usage: tests/bench/against_pytorch.py TESSERA [--python PYTHON]
           [--backend cuda|cpu] [--losses] [--speed] [--models NAME,…]
           [--micro-batches NAME=N,…] [--try "FLAGS"]… [--profile FILE]
           [-o FILE]

--losses: GPT-2 from the same weights on the same samples, without dropout; the
differences of the losses. --speed: tokens per second of each model, each program
at its own best micro batch, one after the other, with Tessera's prediction of
its step; both with a vocabulary padded to a multiple of 64. Both without either
flag. Writes one JSON object: {"losses": {…}, "training": […]}; what each program
printed lies beside FILE as FILE.log.

Micro batches are 1, 2, 4, … as far as these are faster, or those that are given
for a model. --try adds flags of `tessera run` to try on the first model; the
fastest are used for the others.

PYTHON is one that has torch (pytorch_step.py says what it needs).
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PYTORCH = ROOT / "tests/bench/pytorch_step.py"
TEXT = ROOT / "examples/data/gpl-3.txt"

# Name, folder of examples/models. One GPU of 141 GB holds each in bf16 with
# fp32 master weights, gradients and AdamW.
MODELS = {
    "gpt2-124m": "gpt2",
    "gpt2-350m": "gpt2-medium",
    "gpt2-774m": "gpt2-large",
    "gpt2-1558m": "gpt2-xl",
    "llama-7b": "llama-2-7b",
}


class Bench:
    def __init__(self, args, work):
        self.args, self.work = args, pathlib.Path(work)
        self.flags = ["", *args.tries]  # of runs, to be tried
        self.log = open(args.output + ".log", "w", encoding="utf-8")

    def run(self, command, limit):
        """What a program prints on standard output; None where it fails."""
        command = [str(word) for word in command]
        self.log.write("$ " + " ".join(command) + "\n")
        self.log.flush()
        try:
            done = subprocess.run(command, capture_output=True, text=True,
                                  timeout=limit)
        except subprocess.TimeoutExpired:
            self.log.write(f"ran longer than {limit} s\n")
            return None
        self.log.write(done.stderr + done.stdout + f"exit {done.returncode}\n")
        return done.stdout if done.returncode == 0 else None

    def model(self, name, padded=False):
        """The model's folder, its dropout taken out."""
        source = ROOT / "examples/models" / MODELS.get(name, name)
        config = json.loads((source / "config.json").read_text())
        for key in ("embd_pdrop", "resid_pdrop", "attn_pdrop"):
            if key in config:
                config[key] = 0.0
        if padded:
            config["vocab_size"] = -(-config["vocab_size"] // 64) * 64
        folder = self.work / (name + ("-padded" if padded else ""))
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return folder, config["vocab_size"]

    def tessera(self, model, batch, steps, data, *more, micro_batch=None):
        out = self.run(
            [self.args.tessera, "run", "--backend", self.args.backend,
             "--model", model, "--nproc", 1, "--global-batch", batch,
             "--seq-len", self.args.seq_len, "--dtype", self.args.dtype,
             "--strategy", f"dp=1,mbs={micro_batch or batch}",
             "--steps", steps, "--data", data, "--json", *more],
            self.args.time_limit)
        return json.loads(out) if out else None

    def micro_batches(self, name):
        """Those that are given for a model; None: doubling."""
        for given in self.args.micro_batches:
            model, sizes = given.split("=")
            if model == name:
                return [int(size) for size in sizes.split(",")]
        return None

    def best(self, run, sizes):
        """The fastest result of run(micro_batch), and all that were tried:
        doubling from 1 until one does not fit or two in a row are slower, or
        over `sizes`."""
        best, slower, tried = None, 0, []
        for micro_batch in sizes or (1 << i for i in range(20)):
            got = run(micro_batch)
            if got is None and not sizes:
                break
            slower += 1
            tried.append({"micro_batch": micro_batch, "tokens_per_s":
                          got["tokens_per_s"] if got else None})
            if got and (not best or got["tokens_per_s"] > best["tokens_per_s"]):
                best, slower = {**got, "micro_batch": micro_batch}, 0
            if slower == 2 and not sizes:
                break
        return best, tried

    def pytorch(self, model, *more):
        out = self.run(
            [self.args.python, PYTORCH, "--model", model, "--device",
             self.args.backend, "--dtype", self.args.dtype, "--seq-len",
             self.args.seq_len, "--no-dropout", "--time-limit",
             self.args.time_limit / 2, *more],
            self.args.time_limit)
        return json.loads(out.splitlines()[-1]) if out else None

    def losses(self):
        model, _ = self.model(self.args.losses_model)
        weights = self.work / "weights.safetensors"
        batch, steps = self.args.batch, self.args.losses_steps
        theirs = self.pytorch(
            model, "--batch", batch, "--micro-batch", batch, "--warmup", 0,
            "--steps", steps, "--data", TEXT, "--save-weights", weights)
        ours = self.tessera(model, batch, steps, TEXT, "--load", weights)
        if not theirs or not ours:
            return {"failed": True}
        a, b = ours["losses"], theirs["losses"]
        last = len(a) // 4
        return {
            "model": self.args.losses_model, "steps": steps, "batch": batch,
            "seq_len": self.args.seq_len, "dtype": self.args.dtype,
            "torch": theirs["torch"],
            "largest_difference": max(abs(x - y) for x, y in zip(a, b)),
            "mean_of_last_quarter": [statistics.mean(a[-last:]),
                                     statistics.mean(b[-last:])],
            "tessera": a, "pytorch": b,
        }

    def speed(self, name):
        model, vocabulary = self.model(name)
        padded, _ = self.model(name, padded=True)
        # Random ids: the same work as any text, and no zeros to save power.
        data = self.work / f"{vocabulary}.bin"
        if not data.exists():
            ids = np.random.default_rng(0).integers(
                vocabulary, size=1 << 22, dtype=np.uint16)
            ids.tofile(data)
        sizes = self.micro_batches(name)
        more = ["--profile", self.args.profile] if self.args.profile else []
        ours, tried = None, []
        for flags in self.flags:
            words = [*flags.split(), *more]
            if "--tune" in words:
                words.insert(words.index("--tune") + 1, self.work / "products")
            got, these = self.best(
                lambda size: self.tessera(padded, size, self.args.steps, data,
                                          *words), sizes)
            tried += [{**one, "flags": flags} for one in these]
            if got and (not ours or got["tokens_per_s"] > ours["tokens_per_s"]):
                ours = {**got, "flags": flags}
        if ours:
            self.flags = [ours["flags"]]
        if self.args.tessera_only:
            theirs = None
        elif sizes:
            theirs, _ = self.best(
                lambda size: self.pytorch(model, "--steps", self.args.steps,
                                          "--micro-batch", size), sizes)
        else:
            theirs = self.pytorch(model, "--steps", self.args.steps)
        row = {"model": name, "dtype": self.args.dtype,
               "seq_len": self.args.seq_len, "tried": tried}
        if ours:
            rank = ours["memory"]["per_rank"][0]
            row.update(
                micro_batch=ours["micro_batch"],
                flags=ours["flags"],
                tokens_per_s=ours["tokens_per_s"],
                mfu=ours["measured"].get("mfu"),
                mfu_causal=ours["measured"].get("mfu_causal"),
                peak_memory_bytes=rank["total"],
                predicted_memory_bytes=(
                    ours["predicted"]["memory"]["per_rank"][0]["total"]),
                predicted_step_time_s=ours["predicted"]["step_time_s"],
                step_time_s=ours["step_time_s"],
                step_times_s=ours["step_times_s"])
        if theirs:
            row["pytorch"] = theirs
        if ours and theirs:
            row["speedup_over_pytorch"] = (
                ours["tokens_per_s"] / theirs["tokens_per_s"])
        return row


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tessera")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--micro-batches", action="append", default=[],
                        metavar="NAME=N,…")
    parser.add_argument("--try", action="append", default=[], dest="tries",
                        metavar="FLAGS")
    parser.add_argument("--profile", help="of this GPU, for predictions")
    parser.add_argument("--tessera-only", action="store_true")
    parser.add_argument("--losses-model", default="gpt2-124m")
    parser.add_argument("--losses-steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=4, help="of --losses")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--steps", type=int, default=20, help="of --speed")
    parser.add_argument("--time-limit", type=float, default=300,
                        help="seconds for each program that is started")
    parser.add_argument("-o", "--output", default="against_pytorch.json")
    return parser.parse_args()


def main():
    args = parse()
    out = {"training": []}

    def write():
        pathlib.Path(args.output).write_text(json.dumps(out, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as work:
        bench = Bench(args, work)
        if args.losses or not args.speed:
            out["losses"] = bench.losses()
            write()
            print("losses: largest difference",
                  out["losses"].get("largest_difference", "failed"), flush=True)
        for name in args.models.split(",") if (
                args.speed or not args.losses) else []:
            out["training"].append(bench.speed(name))
            write()
            row = out["training"][-1]
            print(name, "tokens/s", row.get("tokens_per_s", "failed"),
                  "of PyTorch's", row.get("speedup_over_pytorch", "unknown"),
                  flush=True)
    failed = "failed" in out.get("losses", {}) or any(
        "speedup_over_pytorch" not in row for row in out["training"]
        if not args.tessera_only)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
