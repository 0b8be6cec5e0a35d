#!/usr/bin/env python3
"""Trains GPT-2 and Llama models by PyTorch, as fast as PyTorch does it.

The same work as `tessera run` with the same model, batch, data and seed: causal
language modelling, clipping by the global norm 1, AdamW with betas 0.9 and 0.95
and weight decay 0.1 on matrices. fp32, or bf16 by autocast: master weights,
gradients and the optimizer's state in fp32. Compiled, fused attention and fused
AdamW unless --eager; the vocabulary is padded to a multiple of 64 on a GPU.

Prints one JSON object: tokens_per_s, step_time_s (the median), peak memory and
the losses. With --micro-batch auto it doubles the micro batch while the device
has memory and reports the fastest. With --data the samples are those of
`tessera run --data` in the same order, and --save-weights writes the initial
weights as `tessera run --load` reads them, so that losses can be compared.
With --serve it takes one step for each line "step" on standard input.

    pip install torch numpy
"""

import argparse
import json
import pathlib
import statistics
import struct
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

# ---- Models: config.json of Hugging Face, one module for both families --------


class Config:
    def __init__(self, path, dropout):
        path = pathlib.Path(path)
        if path.is_dir():
            path = path / "config.json"
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
        self.llama = raw["model_type"] == "llama"
        if not self.llama and raw["model_type"] != "gpt2":
            sys.exit(f"{path}: model_type {raw['model_type']}: gpt2 or llama")
        self.vocabulary = raw["vocab_size"]
        if self.llama:
            self.layers = raw["num_hidden_layers"]
            self.width = raw["hidden_size"]
            self.heads = raw["num_attention_heads"]
            self.kv_heads = raw.get("num_key_value_heads", self.heads)
            self.hidden = raw["intermediate_size"]
            self.epsilon = raw["rms_norm_eps"]
            self.theta = raw.get("rope_theta", 10000.0)
            self.tied = raw.get("tie_word_embeddings", False)
            self.dropout = 0.0
        else:
            self.layers = raw["n_layer"]
            self.width = raw["n_embd"]
            self.heads = self.kv_heads = raw["n_head"]
            self.hidden = raw.get("n_inner") or 4 * self.width
            self.positions = raw["n_positions"]
            self.epsilon = raw["layer_norm_epsilon"]
            self.tied = True
            self.dropout = raw.get("resid_pdrop", 0.0) if dropout else 0.0
        self.head_size = self.width // self.heads
        self.padded_vocabulary = self.vocabulary


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        bias = not c.llama
        norm = nn.RMSNorm if c.llama else nn.LayerNorm
        qkv = (c.heads + 2 * c.kv_heads) * c.head_size
        self.norm_1 = norm(c.width, eps=c.epsilon)
        self.qkv = nn.Linear(c.width, qkv, bias=bias)
        self.out = nn.Linear(c.heads * c.head_size, c.width, bias=bias)
        self.norm_2 = norm(c.width, eps=c.epsilon)
        # SwiGLU's gate and up projection lie side by side.
        self.up = nn.Linear(c.width, c.hidden * (2 if c.llama else 1), bias=bias)
        self.down = nn.Linear(c.hidden, c.width, bias=bias)

    def forward(self, x, rotary):
        c = self.c
        batch, seq, _ = x.shape
        sizes = [n * c.head_size for n in (c.heads, c.kv_heads, c.kv_heads)]
        q, k, v = (
            part.view(batch, seq, -1, c.head_size).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(sizes, dim=2))
        if c.llama:
            q, k = rotate(q, *rotary).to(v.dtype), rotate(k, *rotary).to(v.dtype)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=c.kv_heads < c.heads)
        y = self.out(y.transpose(1, 2).reshape(batch, seq, -1))
        x = x + F.dropout(y, c.dropout)
        y = self.up(self.norm_2(x))
        if c.llama:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y, approximate="tanh")
        return x + F.dropout(self.down(y), c.dropout)


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.wte = nn.Embedding(c.padded_vocabulary, c.width)
        if not c.llama:
            self.wpe = nn.Embedding(c.positions, c.width)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        norm = nn.RMSNorm if c.llama else nn.LayerNorm
        self.norm = norm(c.width, eps=c.epsilon)
        if not c.tied:
            self.head = nn.Linear(c.width, c.padded_vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def rotary(self, seq, device):
        c = self.c
        half = torch.arange(0, c.head_size, 2, device=device) / c.head_size
        angles = torch.outer(
            torch.arange(seq, device=device).float(), c.theta ** -half)
        return angles.cos(), angles.sin()

    def forward(self, tokens, labels):
        c = self.c
        x = self.wte(tokens)
        rotary = None
        if c.llama:
            rotary = self.rotary(tokens.shape[1], tokens.device)
        else:
            x = x + self.wpe(torch.arange(tokens.shape[1], device=x.device))
            x = F.dropout(x, c.dropout)
        for block in self.blocks:
            x = block(x, rotary)
        weight = self.wte.weight if c.tied else self.head.weight
        logits = F.linear(self.norm(x), weight)
        if c.padded_vocabulary > c.vocabulary:
            logits = logits[..., : c.vocabulary]
        return F.cross_entropy(
            logits.float().flatten(0, 1), labels.reshape(-1))


# ---- Weights as Hugging Face publishes them ------------------------------------


def published_weights(model):
    """Pairs of name and tensor; GPT-2's matrices are transposed there."""
    c = model.c
    turn = (lambda w: w) if c.llama else (lambda w: w.t())
    yield ("model.embed_tokens.weight" if c.llama else "wte.weight",
           model.wte.weight[: c.vocabulary])
    if not c.llama:
        yield "wpe.weight", model.wpe.weight
    for i, block in enumerate(model.blocks):
        if c.llama:
            prefix = f"model.layers.{i}."
            sizes = [n * c.head_size for n in (c.heads, c.kv_heads, c.kv_heads)]
            for name, part in zip("qkv", block.qkv.weight.split(sizes)):
                yield f"{prefix}self_attn.{name}_proj.weight", part
            gate, up = block.up.weight.chunk(2)
            yield f"{prefix}mlp.gate_proj.weight", gate
            yield f"{prefix}mlp.up_proj.weight", up
            modules = {"input_layernorm": block.norm_1,
                       "self_attn.o_proj": block.out,
                       "post_attention_layernorm": block.norm_2,
                       "mlp.down_proj": block.down}
        else:
            prefix = f"h.{i}."
            modules = {"ln_1": block.norm_1, "attn.c_attn": block.qkv,
                       "attn.c_proj": block.out, "ln_2": block.norm_2,
                       "mlp.c_fc": block.up, "mlp.c_proj": block.down}
        for name, module in modules.items():
            matrix = module.weight.dim() > 1
            yield (f"{prefix}{name}.weight",
                   turn(module.weight) if matrix else module.weight)
            if getattr(module, "bias", None) is not None:
                yield f"{prefix}{name}.bias", module.bias
    yield ("model.norm.weight" if c.llama else "ln_f.weight", model.norm.weight)
    if not c.llama:
        yield "ln_f.bias", model.norm.bias
    if not c.tied:
        yield "lm_head.weight", model.head.weight[: c.vocabulary]


def save_weights(model, path):
    """A safetensors file: a header in JSON, then the tensors."""
    header, blobs, at = {}, [], 0
    for name, tensor in published_weights(model):
        blob = tensor.detach().float().cpu().contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape),
                        "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for blob in blobs:
            file.write(blob)


# ---- Data: tessera's formats and order (runtime/data) --------------------------

MASK = (1 << 64) - 1


def mix64(z):
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def permuted(key, i, n):
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for step in range(4):
            mixed = mix64(key ^ mix64(4 * right + step))
            left, right = right, left ^ (mixed & mask)
        i = left << half | right
        if i < n:
            return i


class Data:
    def __init__(self, args, vocabulary):
        self.args, self.vocabulary, self.tokens = args, vocabulary, None
        if args.data is None:
            return
        if args.data.endswith(".bin"):
            head = np.fromfile(args.data, dtype=np.int32, count=2)
            llmc = len(head) == 2 and head[0] == 20240520
            self.tokens = np.memmap(args.data, dtype=np.uint16, mode="r",
                                    offset=1024 if llmc else 0)
        else:
            self.tokens = np.memmap(args.data, dtype=np.uint8, mode="r")

    def batch(self, step, samples):
        """The tokens and labels of global batch `step`."""
        seq = self.args.seq_len
        if self.tokens is None:
            both = torch.randint(self.vocabulary, (samples, seq + 1))
            return both[:, :-1], both[:, 1:]
        rows = (len(self.tokens) - 1) // seq
        out = np.empty((samples, seq + 1), dtype=np.int64)
        for i in range(samples):
            sample = step * samples + i
            key = mix64(mix64(self.args.seed) ^ (sample // rows))
            row = permuted(key, sample % rows, rows)
            out[i] = self.tokens[row * seq:row * seq + seq + 1]
        both = torch.from_numpy(out)
        return both[:, :-1], both[:, 1:]


# ---- Steps ---------------------------------------------------------------------


class Trainer:
    def __init__(self, args, config):
        self.args = args
        self.cuda = args.device == "cuda"
        torch.manual_seed(args.seed)
        with torch.device(args.device):
            self.model = Model(config)
        if args.save_weights:
            save_weights(self.model, args.save_weights)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        decay = 0.1
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": decay},
             {"params": others, "weight_decay": args.vector_decay}],
            lr=args.lr, betas=(0.9, 0.95), fused=not args.eager)
        self.compiled = self.model
        if not args.eager:
            # Each size has code of its own: what is compiled for any is slower.
            self.compiled = torch.compile(self.model, dynamic=False)
        self.data = Data(args, config.vocabulary)

    def step(self, number, micro_batch, batch):
        tokens, labels = self.data.batch(number, batch)
        if self.cuda:
            tokens, labels = (
                x.pin_memory().to("cuda", non_blocking=True)
                for x in (tokens.contiguous(), labels.contiguous()))
        loss_sum = torch.zeros((), device=self.args.device)
        for at in range(0, batch, micro_batch):
            part = slice(at, at + micro_batch)
            with torch.autocast(self.args.device, torch.bfloat16,
                                enabled=self.args.dtype == "bf16"):
                loss = self.compiled(tokens[part], labels[part])
            share = (min(at + micro_batch, batch) - at) / batch
            (loss * share).backward()
            loss_sum += loss.detach() * share
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss_sum

    def measure(self, micro_batch, batch):
        """Losses of all steps, and seconds of those behind the warm-up."""
        losses, seconds = [], []
        for number in range(self.args.warmup + self.args.steps):
            start = time.perf_counter()
            losses.append(self.step(number, micro_batch, batch).item())
            if number >= self.args.warmup:
                seconds.append(time.perf_counter() - start)
        return losses, seconds

    def result(self, micro_batch, batch):
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        losses, seconds = self.measure(micro_batch, batch)
        median = statistics.median(seconds)
        return {
            "micro_batch": micro_batch, "batch": batch,
            "step_time_s": median,
            "tokens_per_s": batch * self.args.seq_len / median,
            "peak_memory_bytes":
                torch.cuda.max_memory_allocated() if self.cuda else None,
            "losses": losses,
        }


def best_of_doubling(args, trainer):
    """The fastest of micro batches 1, 2, 4, … until memory ends or two in a row
    are slower."""
    results, micro_batch, slower = [], 1, 0
    deadline = time.monotonic() + args.time_limit
    while slower < 2 and time.monotonic() < deadline:
        try:
            results.append(trainer.result(micro_batch, micro_batch))
        except torch.OutOfMemoryError:
            break
        finally:
            trainer.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        best = max(r["tokens_per_s"] for r in results)
        slower = slower + 1 if results[-1]["tokens_per_s"] < best else 0
        print(json.dumps({k: results[-1][k] for k in
                          ("micro_batch", "tokens_per_s")}),
              file=sys.stderr, flush=True)
        micro_batch *= 2
    if not results:
        sys.exit("micro batch 1 does not fit")
    best = max(results, key=lambda r: r["tokens_per_s"])
    best["tried"] = [r["micro_batch"] for r in results]
    return best


def serve(args, trainer):
    print("torch", torch.__version__, flush=True)
    for number, command in enumerate(sys.stdin):
        if command.strip() != "step":
            break
        start = time.perf_counter()
        micro_batch = (args.batch if args.micro_batch == "auto" else
                       int(args.micro_batch))
        trainer.step(number, micro_batch, args.batch).item()
        print(time.perf_counter() - start, flush=True)


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=0,
                        help="sequences of a step (default: a micro batch)")
    parser.add_argument("--micro-batch", default="auto")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--no-dropout", action="store_true")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--vector-decay", type=float, default=0.0,
                        help="weight decay of norms and biases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data")
    parser.add_argument("--save-weights")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=240)
    parser.add_argument("--serve", action="store_true")
    return parser.parse_args()


def main():
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    config = Config(args.model, not args.no_dropout)
    if args.device == "cuda":
        config.padded_vocabulary = -(-config.vocabulary // 64) * 64
    trainer = Trainer(args, config)
    if args.serve:
        return serve(args, trainer)
    if args.micro_batch == "auto":
        result = best_of_doubling(args, trainer)
    else:
        micro_batch = int(args.micro_batch)
        result = trainer.result(micro_batch, args.batch or micro_batch)
    result.update(
        torch=torch.__version__, dtype=args.dtype, compiled=not args.eager,
        device=torch.cuda.get_device_name() if args.device == "cuda" else "cpu")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
