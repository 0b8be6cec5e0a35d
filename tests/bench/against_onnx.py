#!/usr/bin/env python3
"""Exports models by PyTorch's exporters to ONNX and trains them by Tessera and by
PyTorch, on the CPU, from the same weights on the same samples, and compares the
losses. onnxruntime's loss of the first batch is compared, too.

usage: tests/bench/against_onnx.py TESSERA [--steps N] [MODEL…]
       tests/bench/against_onnx.py --write FOLDER [MODEL…]

The second form writes the files, tests/testdata/onnx are some. Prints one JSON
object: for each model the losses and the largest relative differences. Exit
status 1 where one is above 1e-4.

    pip install torch transformers onnx onnxruntime onnxscript numpy
"""

import argparse
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

import numpy as np
import onnx
import onnxruntime
import torch
import transformers
from onnx import numpy_helper
from torch import nn
from torch.nn import functional as F

from against_transformers import adamw
from pytorch_step import mix64, permuted

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TEXT = ROOT / "examples/data/gpl-3.txt"
BATCH, SEQ_LEN, SEED, IMAGES, LABELS = 8, 16, 3, 100, 10
TOLERANCE = 1e-4


# ---- Models --------------------------------------------------------------------

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 8 * 8, 32), nn.ReLU(),
            nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.SiLU(),
            nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, LABELS))

    def forward(self, images):
        return self.layers(images)


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = Residual(8, 8, 1)
        self.layer2 = Residual(8, 16, 2)
        self.fc = nn.Linear(16, LABELS)

    def forward(self, images):
        x = self.pool(F.relu(self.bn(self.conv(images))))
        x = F.adaptive_avg_pool2d(self.layer2(self.layer1(x)), 1)
        return self.fc(torch.flatten(x, 1))


class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2)
        self.one = nn.Conv2d(8, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(),
                                   nn.Conv2d(4, 6, 3, padding=1))
        self.wide = nn.Sequential(nn.Conv2d(8, 4, (1, 5), padding=(0, 2)),
                                  nn.ReLU(),
                                  nn.Conv2d(4, 6, (5, 1), padding=(2, 0)))
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(8, 4, 1))
        self.fc = nn.Linear(20 * 3 * 3, LABELS)

    def forward(self, images):
        x = F.relu(self.stem(images))
        x = F.relu(torch.cat([self.one(x), self.three(x), self.wide(x),
                              self.pooled(x)], 1))
        x = F.max_pool2d(x, 3, 2, ceil_mode=True)
        return self.fc(torch.flatten(x, 1))


class Grouped(nn.Module):
    """Convolutions of each channel and of groups of channels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.expand = nn.Conv2d(8, 12, 1)
        self.each = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.mix = nn.Conv2d(12, 8, 1, bias=False)
        self.widen = nn.Conv2d(8, 12, 1)
        self.groups = nn.Conv2d(12, 16, 3, padding=1, groups=4)
        self.norm = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, LABELS)

    def forward(self, images):
        x = F.relu(self.stem(images))
        x = x + self.mix(F.silu(self.each(self.expand(x))))
        x = F.relu(self.norm(self.groups(self.widen(x))))
        x = F.max_pool2d(x, 2)
        return self.fc(x.mean((2, 3)))


class Tokens(nn.Module):
    """A layer norm and an MLP for each token, behind a residual."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 256, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        y = self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))
        return self.head(x + y)


class Transformer(nn.Module):
    """A model of transformers, by its logits alone."""

    def __init__(self, kind, **config):
        super().__init__()
        names = {"vocab_size": 256, "attn_implementation": "sdpa", **config}
        self.model = kind(kind.config_class(**names))

    def forward(self, inputs):
        return self.model(inputs).logits


def gpt2():
    return Transformer(
        transformers.GPT2LMHeadModel, n_positions=32, n_embd=16, n_layer=2,
        n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
        tie_word_embeddings=False)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 32, "hidden_dropout_prob": 0,
         "attention_probs_dropout_prob": 0}


def bert():
    return Transformer(transformers.BertForMaskedLM, max_position_embeddings=32,
                       tie_word_embeddings=False, **SMALL)


def vit():
    return Transformer(transformers.ViTForImageClassification, image_size=16,
                       patch_size=4, num_labels=LABELS, **SMALL)


def images_of(size):
    return lambda: torch.rand(2, 3, size, size)


def tokens():
    return torch.randint(0, 256, (2, SEQ_LEN))


# By name: the model, an example of its input, which of PyTorch's exporters. The
# older one keeps batch norms, which the other folds into convolutions.
MODELS = {
    "mlp": (Mlp, images_of(8), "dynamo"),
    "mlp-script": (Mlp, images_of(8), "script"),
    "residual": (ResNet, images_of(16), "script"),
    "inception": (Inception, images_of(16), "dynamo"),
    "grouped": (Grouped, images_of(16), "script"),
    "tokens": (Tokens, tokens, "script"),
    "tokens-dynamo": (Tokens, tokens, "dynamo"),
    "gpt2": (gpt2, tokens, "dynamo"),
    "bert": (bert, tokens, "dynamo"),
    "bert-script": (bert, tokens, "script"),
    "vit": (vit, images_of(16), "dynamo"),
    "vit-script": (vit, images_of(16), "script"),
}


def export(name, path):
    """Writes the model's file and returns the module."""
    kind, example, exporter = MODELS[name]
    torch.manual_seed(0)
    module = kind().train()
    # Exporters write equal tensors once, and none for zeros.
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    inputs = (example(),)
    if exporter == "dynamo":
        axes = {0: torch.export.Dim("batch")}
        if inputs[0].dim() == 2:
            axes[1] = torch.export.Dim("sequence", max=32)
        torch.onnx.export(module, inputs, path, dynamo=True, opset_version=18,
                          dynamic_shapes=(axes,), external_data=False,
                          verbose=False)
    else:
        axes = {0: "batch", 1: "sequence"} if inputs[0].dim() == 2 else {
            0: "batch"}
        torch.onnx.export(module, inputs, path, dynamo=False, opset_version=17,
                          input_names=["input"], dynamic_axes={"input": axes},
                          training=torch.onnx.TrainingMode.TRAINING,
                          do_constant_folding=False)
    module.train()
    return module


def stripped(model):
    """Without what says where in PyTorch's program a node came from."""
    for part in [model, model.graph, *model.graph.node, *model.graph.input,
                 *model.graph.output, *model.graph.initializer]:
        for field in ("metadata_props", "doc_string"):
            part.ClearField(field)
    model.graph.ClearField("value_info")
    return model


# ---- Data ----------------------------------------------------------------------

class Samples:
    """runtime/data/{batches,images}.cc."""

    def __init__(self, example, work):
        if example.dim() == 2:
            self.path = TEXT
            self.tokens = np.frombuffer(TEXT.read_bytes(), dtype=np.uint8)
            self.count = (len(self.tokens) - 1) // SEQ_LEN
            return
        self.tokens = None
        self.count = IMAGES
        random = np.random.default_rng(0)
        self.labels = random.integers(0, LABELS, (IMAGES, 1), dtype=np.uint8)
        pixels = random.integers(0, 256, (IMAGES, example[0].numel()),
                                 dtype=np.uint8)
        self.images = (pixels / 127.5 - 1).astype(np.float32).reshape(
            IMAGES, *example.shape[1:])
        self.path = work / "images.bin"
        self.path.write_bytes(np.hstack([self.labels, pixels]).tobytes())

    def batch(self, step):
        rows = []
        for sample in range(step * BATCH, (step + 1) * BATCH):
            key = mix64(mix64(SEED) ^ (sample // self.count))
            rows.append(permuted(key, sample % self.count, self.count))
        if self.tokens is None:
            return (self.images[rows],
                    self.labels[rows, 0].astype(np.int64))
        parts = np.array([self.tokens[row * SEQ_LEN:(row + 1) * SEQ_LEN + 1]
                          for row in rows]).astype(np.int64)
        return parts[:, :-1], parts[:, 1:]


# ---- Weights -------------------------------------------------------------------

def read_weights(path):
    """The tensors of a safetensors file in fp32, by name."""
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(size))
        data = file.read()
    weights = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[begin:end], dtype=np.float32)
        weights[name] = values.reshape(entry["shape"])
    return weights


def is_in_out(graph, name):
    """Whether a matrix of the file is (in, out), as Tessera's are not."""
    for node in graph.node:
        if name not in list(node.input)[1:2]:
            continue
        if node.op_type == "MatMul":
            return True
        if node.op_type == "Gemm":
            return not any(a.name == "transB" and a.i for a in node.attribute)
    return False


def set_weights(weights, model, module):
    """Tessera's weights in the file's tensors and in the module's."""
    parameters = dict(module.named_parameters())
    used = set()
    for tensor in model.graph.initializer:
        old = numpy_helper.to_array(tensor)
        if old.dtype != np.float32 or old.size < 2 or "running_" in tensor.name:
            continue
        pieces = [name for name in weights
                  if name == tensor.name or
                  name.rpartition(".")[0] == tensor.name and
                  name.rpartition(".")[2].isdigit()]
        if not pieces:
            continue
        used.update(pieces)
        transposed = is_in_out(model.graph, tensor.name)
        shape = old.shape[::-1] if transposed else old.shape
        new = np.concatenate([weights[name].reshape(-1, *shape[1:])
                              for name in sorted(pieces)])
        new = new.reshape(shape).T if transposed else new.reshape(shape)
        new = np.ascontiguousarray(new)
        # The exporter may have renamed a parameter that it transposed.
        with torch.no_grad():
            for name, parameter in parameters.items():
                was = parameter.numpy()
                if was.shape == old.shape and np.array_equal(was, old):
                    parameter.copy_(torch.from_numpy(new))
                elif was.T.shape == old.shape and np.array_equal(was.T, old):
                    parameter.copy_(torch.from_numpy(new.T.copy()))
                else:
                    continue
                del parameters[name]
                break
            else:
                sys.exit(f"no parameter is '{tensor.name}'")
        tensor.CopyFrom(numpy_helper.from_array(new, tensor.name))
    # Parameters that no output reads are not in the file.
    if set(weights) - used:
        sys.exit(f"not in the file: {sorted(set(weights) - used)}")


# ---- Training ------------------------------------------------------------------

def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def train(module, samples, steps):
    decays = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    optimizer = adamw(decays, others)
    losses = []
    for step in range(steps):
        inputs, labels = map(torch.from_numpy, samples.batch(step))
        loss = loss_of(module(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(args, name, work):
    path = work / (name + ".onnx")
    module = export(name, path)
    samples = Samples(MODELS[name][1](), work)

    def tessera(*more):
        return json.loads(subprocess.run(
            [args.tessera, "run", "--model", path, "--data", samples.path,
             "--dtype", "fp32", "--global-batch", str(BATCH), "--seed",
             str(SEED), "--json", *more] +
            (["--seq-len", str(SEQ_LEN)] if samples.path == TEXT else []),
            check=True, stdout=subprocess.PIPE, text=True).stdout)

    tessera("--steps", "1", "--lr", "1e-30", "--save", work / "weights")
    weights = {name: values
               for name, values in read_weights(work / "weights").items()
               if not name.startswith("optimizer.")}
    own = tessera("--steps", str(args.steps), "--lr", "1e-3", "--nproc", "4",
                  "--strategy", f"dp=2,tp=2,mbs={BATCH // 2}")["losses"]
    model = onnx.load(path)
    set_weights(weights, model, module)
    inputs, labels = samples.batch(0)
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"])
    logits = session.run(None, {session.get_inputs()[0].name: inputs})[0]
    runtime = loss_of(torch.from_numpy(logits),
                      torch.from_numpy(labels)).item()
    other = train(module, samples, args.steps)
    return {"tessera": own, "pytorch": other, "onnxruntime": runtime,
            "difference_of_onnxruntime": abs(own[0] - runtime) / runtime,
            "largest_difference": max(abs(a - b) / b
                                      for a, b in zip(own, other))}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera", nargs="?")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--write")
    args = parser.parse_args()
    if args.write:
        for name in [args.tessera] + args.models if args.tessera else MODELS:
            path = pathlib.Path(args.write) / (name + ".onnx")
            export(name, path)
            onnx.save(stripped(onnx.load(path)), path)
        return
    args.tessera = str(pathlib.Path(args.tessera).resolve())
    results = {}
    for name in args.models or MODELS:
        with tempfile.TemporaryDirectory() as work:
            results[name] = compare(args, name, pathlib.Path(work))
    print(json.dumps(results, indent=1))
    sys.exit(any(max(r["largest_difference"], r["difference_of_onnxruntime"]) >
                 TOLERANCE for r in results.values()))


if __name__ == "__main__":
    main()
