#!/usr/bin/env python3
"""Exports models by PyTorch's exporters to ONNX, with weights in the file, runs
and trains them by Tessera and by PyTorch on the CPU on the same samples, and
compares: outputs with onnxruntime's, losses of some steps, and the gradients of
the first step.

usage: tests/bench/against_onnx.py TESSERA [--steps N] [MODEL…]
       tests/bench/against_onnx.py --write FOLDER [MODEL…]

The second form writes the files, tests/testdata/onnx are some. Prints one JSON
object: for each model the losses and the largest relative differences: of an
output, in the norm of all; of a loss; of a gradient, in the norm of that of a
tensor of the file (or a hundredth of all, where that is larger: a bias in front
of a norm has none). Exit status 1 where one is above 1e-4. Outputs are
those of tests/tessera_onnx_outputs beside TESSERA, on one rank; losses and
gradients of 4 ranks.

    pip install torch transformers onnx onnxruntime onnxscript safetensors numpy
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import onnx
import onnxruntime
import torch
import transformers
from onnx import numpy_helper
from safetensors.numpy import load_file
from torch import nn
from torch.nn import functional as F

import edge_models
import image_models
import plain_models
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


class Regrouped(nn.Module):
    """Groups of channels that are not the neighbours'."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.norm = nn.GroupNorm(4, 16)
        self.each = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.halves = nn.Conv2d(16, 32, 3, padding=1, groups=2)
        self.eighths = nn.GroupNorm(8, 32)
        self.quarters = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2, groups=2)
        self.fc = nn.Linear(16, LABELS)

    def forward(self, images):
        x = self.stem(images)
        x = x + self.each(F.relu(self.norm(x)))
        x = self.quarters(F.silu(self.eighths(self.halves(x))))
        return self.fc(self.up(x).mean((2, 3)))


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


class Masks(nn.Module):
    """Attention in a window, linear attention, whose mask is a factor, and a
    gate of one number."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.projection = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.linear = nn.Linear(16, 48)
        self.gate = nn.ParameterDict({"number": nn.Parameter(torch.tensor(0.3))})
        self.head = nn.Linear(16, 256, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        samples, places, width = x.shape
        at = torch.arange(places)
        apart = at[:, None] - at[None]
        q, k, v = (self.projection(x).view(samples, places, 3, 2, width // 2)
                   .permute(2, 0, 3, 1, 4))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=(apart >= 0) & (apart < 5))
        x = x + self.out(y.transpose(1, 2).reshape(samples, places, width))
        q, k, v = self.linear(x).chunk(3, -1)
        scores = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(1, 2)
        scores = scores * torch.tril(torch.ones(places, places))
        y = scores @ v / (scores.sum(-1, keepdim=True) + 1e-6)
        return self.head(x + y * self.gate["number"])


class Tagger(nn.Module):
    """Labels of all tokens behind a recurrent layer in both directions."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.layer = nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens))[0])


class Transformer(nn.Module):
    """A model of transformers, by its logits alone."""

    def __init__(self, kind, **config):
        super().__init__()
        names = {"vocab_size": 256, "attn_implementation": "sdpa", **config}
        self.model = kind(kind.config_class(**names))

    def forward(self, inputs):
        return self.model(inputs).logits


def gpt2(tied=False):
    return Transformer(
        transformers.GPT2LMHeadModel, n_positions=32, n_embd=16, n_layer=2,
        n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
        tie_word_embeddings=tied)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 32, "hidden_dropout_prob": 0,
         "attention_probs_dropout_prob": 0}


def bert(tied=False):
    return Transformer(transformers.BertForMaskedLM, max_position_embeddings=32,
                       tie_word_embeddings=tied, **SMALL)


def vit():
    return Transformer(transformers.ViTForImageClassification, image_size=16,
                       patch_size=4, num_labels=LABELS, **SMALL)


def deit():
    return Transformer(transformers.DeiTForImageClassification, image_size=16,
                       patch_size=4, num_labels=LABELS, **SMALL)


class Translator(nn.Module):
    """An encoder and a decoder of recurrent layers, which begins in the state that
    the other ends in; where the encoder reads both ways, behind its outputs."""

    def __init__(self, kind, both_ways=False):
        super().__init__()
        self.both_ways = both_ways
        self.embed_source = nn.Embedding(256, 12)
        self.embed_target = nn.Embedding(256, 12)
        self.encoder = kind(12, 16, 2, batch_first=True,
                            bidirectional=both_ways)
        self.decoder = kind(12, 16, 2, batch_first=True)
        self.head = nn.Linear(32 if both_ways else 16, 256)

    def forward(self, source, tokens):
        memory, state = self.encoder(self.embed_source(source))
        y, _ = self.decoder(self.embed_target(tokens),
                            None if self.both_ways else state)
        if self.both_ways:
            y = memory + torch.cat([y, y], -1)
        return self.head(y)


def llama():
    return Transformer(
        transformers.LlamaForCausalLM, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        max_position_embeddings=32, use_cache=False)


def scaled_llama(kind):
    """With positions that are scaled, on enough pairs of features to tell how."""
    return Transformer(
        transformers.LlamaForCausalLM, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
        max_position_embeddings=256, use_cache=False, rope_parameters={
            "rope_type": kind, "rope_theta": 1e4, "factor": 8,
            "low_freq_factor": 1, "high_freq_factor": 4,
            "original_max_position_embeddings": 64})


class T5(nn.Module):
    """By its logits alone."""

    def __init__(self):
        super().__init__()
        self.model = transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=256, d_model=16, d_kv=4, d_ff=32, num_layers=2,
                num_heads=4, dropout_rate=0, use_cache=False,
                relative_attention_num_buckets=8,
                relative_attention_max_distance=20,
                attn_implementation="eager"))

    def forward(self, source, tokens):
        return self.model(input_ids=source, decoder_input_ids=tokens).logits


class Experts(nn.Module):
    """A layer of experts, of which each token is given to all, weighted by a
    softmax over what a router says."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.router = nn.Linear(16, 4, bias=False)
        self.up = nn.Parameter(0.2 * torch.randn(4, 16, 32))
        self.down = nn.Parameter(0.2 * torch.randn(4, 32, 16))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        x = self.embedding(tokens)
        weights = torch.softmax(self.router(x), -1)
        y = F.silu(torch.einsum("bsh,ehf->bsef", x, self.up))
        y = torch.einsum("bsef,efh->bseh", y, self.down)
        return self.head(x + torch.einsum("bseh,bse->bsh", y, weights))


class Routed(Experts):
    """The same of the two experts that the router finds best; all compute all
    tokens, and `gates` says how much each counts."""

    def __init__(self, gates):
        super().__init__()
        self.gates = gates

    def forward(self, tokens):
        x = self.embedding(tokens)
        weights, chosen = torch.softmax(self.router(x), -1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        y = F.silu(torch.einsum("bsh,ehf->bsef", x, self.up))
        y = torch.einsum("bsef,efh->bseh", y, self.down)
        y = torch.einsum("bseh,bse->bsh", y, self.gates(weights, chosen))
        return self.head(x + y)


def scattered(weights, chosen):
    zeros = weights.new_zeros(*weights.shape[:2], 4)
    return zeros.scatter(-1, chosen, weights)


def one_hot(weights, chosen):
    return (F.one_hot(chosen, 4).to(weights.dtype) * weights[..., None]).sum(-2)


class OneByOne(Experts):
    """The same, expert after expert."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        weights, chosen = torch.softmax(self.router(x), -1).topk(2)
        total = torch.zeros_like(x)
        for i, (up, down) in enumerate(zip(self.up, self.down)):
            gate = torch.where(chosen == i, weights, 0.0).sum(-1, keepdim=True)
            total = total + gate * (F.silu(x @ up) @ down)
        return self.head(x + total)


class Gathered(Experts):
    """The same by the chosen experts' own matrices, one for each token."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        weights, chosen = torch.softmax(self.router(x), -1).topk(2)
        y = F.silu(torch.einsum("bsh,bskhf->bskf", x, self.up[chosen]))
        y = torch.einsum("bskf,bskfh->bskh", y, self.down[chosen])
        return self.head(x + (y * weights[..., None]).sum(-2))


def routed(kind, **config):
    """Of transformers, whose experts the exporter takes in this form alone."""
    return Transformer(
        kind, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts_per_tok=2,
        max_position_embeddings=32, use_cache=False,
        experts_implementation="batched_mm", **config)


def mixtral():
    return routed(transformers.MixtralForCausalLM, intermediate_size=32,
                  num_local_experts=4, sliding_window=None)


def qwen2_moe():
    return routed(transformers.Qwen2MoeForCausalLM, intermediate_size=32,
                  num_experts=4, moe_intermediate_size=24,
                  shared_expert_intermediate_size=32)


def images_of(size):
    return lambda: (torch.rand(2, 3, size, size),)


def tokens():
    return (torch.randint(0, 256, (2, SEQ_LEN)),)


def pairs():
    return tokens() + tokens()


def image_models_of(name):
    module, example = image_models.MODELS[name]
    return module, lambda: (example(),)


# Models of images that PyTorch's exporters do not write (adaptive maxima), and
# whose nodes are not mapped (ids that are computed, channels that are shuffled
# between grouped convolutions); tools/export_torch.py maps them.
NOT_WRITTEN = {"pools", "pools-uneven", "normed", "shuffled-channels",
               "shufflenet_v2_x0_5"}
# Of images; models that both exporters write, the one beside its name.
BOTH = ("cbam", "tokens-expanded", "tokens-repeated", "queries-of-images",
        "torchvision-vit")
# By name: the model, an example of its input, which of PyTorch's exporters. The
# older one keeps batch norms, which the other folds into convolutions.
MODELS = {
    "mlp": (Mlp, images_of(8), "dynamo"),
    "mlp-script": (Mlp, images_of(8), "script"),
    "residual": (ResNet, images_of(16), "script"),
    "inception": (Inception, images_of(16), "dynamo"),
    "grouped": (Grouped, images_of(16), "script"),
    "regrouped": (Regrouped, images_of(16), "dynamo"),
    "regrouped-script": (Regrouped, images_of(16), "script"),
    "tokens": (Tokens, tokens, "script"),
    "tokens-dynamo": (Tokens, tokens, "dynamo"),
    "masks": (Masks, tokens, "dynamo"),
    "masks-script": (Masks, tokens, "script"),
    "tagger-script": (Tagger, tokens, "script"),
    "gpt2": (gpt2, tokens, "dynamo"),
    "gpt2-tied": (lambda: gpt2(True), tokens, "dynamo"),
    "bert": (bert, tokens, "dynamo"),
    "bert-script": (bert, tokens, "script"),
    "bert-tied": (lambda: bert(True), tokens, "dynamo"),
    "bert-tied-script": (lambda: bert(True), tokens, "script"),
    "vit": (vit, images_of(16), "dynamo"),
    "vit-script": (vit, images_of(16), "script"),
    "lstm": (lambda: Translator(nn.LSTM), pairs, "dynamo"),
    "lstm-script": (lambda: Translator(nn.LSTM), pairs, "script"),
    "lstm-both-ways": (lambda: Translator(nn.LSTM, True), pairs, "dynamo"),
    "llama": (llama, tokens, "dynamo"),
    "llama-3.1": (lambda: scaled_llama("llama3"), tokens, "dynamo"),
    "llama-yarn": (lambda: scaled_llama("yarn"), tokens, "dynamo"),
    "t5": (T5, pairs, "dynamo"),
    "experts": (Experts, tokens, "dynamo"),
    "routed-scatter": (lambda: Routed(scattered), tokens, "dynamo"),
    "routed-scatter-script": (lambda: Routed(scattered), tokens, "script"),
    "routed-one-hot": (lambda: Routed(one_hot), tokens, "dynamo"),
    "routed-one-hot-script": (lambda: Routed(one_hot), tokens, "script"),
    "routed-where": (OneByOne, tokens, "dynamo"),
    "routed-where-script": (OneByOne, tokens, "script"),
    "routed-gather": (Gathered, tokens, "dynamo"),
    "routed-gather-script": (Gathered, tokens, "script"),
    "mixtral": (mixtral, tokens, "dynamo"),
    "qwen2-moe": (qwen2_moe, tokens, "dynamo"),
    "gru": (lambda: Translator(nn.GRU), pairs, "dynamo"),
    "gru-script": (lambda: Translator(nn.GRU, True), pairs, "script"),
    **{name: (*image_models_of(name),
              "dynamo" if name in ("text", "depths", "unet-corners-instance")
              else "script")
       for name in image_models.MODELS if name not in NOT_WRITTEN},
    **{name + "-dynamo": (*image_models_of(name), "dynamo")
       for name in BOTH},
    **{name + "-fixed" + of: (*image_models_of(name), exporter)
       for name in BOTH if name != "queries-of-images"
       for of, exporter in (("", "script"), ("-dynamo", "dynamo"))},
    "deit": (deit, images_of(16), "dynamo"),
    "deit-fixed": (deit, images_of(16), "dynamo"),
    "deit-script": (deit, images_of(16), "script"),
    "shuffled-dynamo": (*image_models_of("shuffled"), "dynamo"),
    "depths-script": (*image_models_of("depths"), "script"),
}


# torch.export does not trace nn.Transformer without a hint: it asks for the
# elements of its mask. nn.RNN it writes with matrices times zero, and a matrix
# of weight_norm as what it is when it is written.
NOT_TRACED = {"weight-norm", "transformer", "transformer-norm-first",
              "transformer-steps-first", "series-rnn"}
# A rotary embedding of neighbours, attention over an image's rows and columns;
# what tools/export_torch.py alone is known to map.
NOT_MAPPED = {"llama-pairs", "vit-mean", "axial", "axial-dimensions", "alibi",
              "gated", "heads", "in-place", "repeats", "series-attention",
              "steps", "unscaled", "whisper", "known-norms", "known-order"}
# The older exporter does not say that their numbers are buffers: they are
# trained there, with a warning.
NOT_TOLD = {"known-choice", "known-matrix", "masked-numbers", "standardised"}


def plain(name):
    make, kind = plain_models.MODELS[name]
    example = lambda: tuple(plain_models.example(kind, 2, SEQ_LEN).values())
    return {of: (make, example, exporter) for of, exporter in
            ((name, "dynamo"), (name + "-script", "script"))
            if name not in (NOT_TOLD if exporter == "script" else NOT_TRACED)}


# Of edge_models.py, those whose parameters stand beside data, and loops.
EDGES = ("prompt", "prompt-repeated", "queries", "pooled", "lstm-cell",
         "gru-cell", "rnn-cell")
for name in EDGES:
    MODELS |= {name + of: (edge_models.MODELS[name][0], tokens, exporter)
               for of, exporter in (("", "dynamo"), ("-script", "script"))}
for name, (_, kind) in plain_models.MODELS.items():
    # Text does not have one label.
    if kind != "texts" and name not in NOT_MAPPED:
        MODELS |= plain(name)


@torch.no_grad()
def make_distinct(module):
    """No two numbers of the parameters are equal, so that each one of a file is
    that of a parameter, wherever an exporter has moved it. (Exporters write equal
    tensors once, and none for zeros.)"""
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.add_(0.02 * torch.randn_like(parameter))
    values = torch.cat([p.flatten() for p in parameters]).numpy()
    while len(unique := np.unique(values, return_index=True)[1]) < len(values):
        equal = np.setdiff1d(np.arange(len(values)), unique)
        values[equal] += 1e-3 * np.random.default_rng(0).standard_normal(
            len(equal)).astype(np.float32)
    at = 0
    for parameter in parameters:
        parameter.copy_(torch.from_numpy(
            values[at:at + parameter.numel()]).reshape(parameter.shape))
        at += parameter.numel()


# The exporter computes T5's table of relative biases while it writes the file,
# which then has a bias for each pair of places and no table: the gradient of the
# table is the sum of theirs, but a step moves them apart.
ONE_STEP = {"t5"}
# Files of BATCH samples, whose number is no symbol.
FIXED = {name for name in MODELS if "-fixed" in name}
# Deep models with batch norms of few samples make the most of what is rounded:
# they are trained in fp64, for three steps at most.
WIDE = set(image_models.TORCHVISION)


def export(name, path):
    """Writes the model's file and returns the module."""
    kind, example, exporter = MODELS[name]
    torch.manual_seed(0)
    module = kind().train()
    make_distinct(module)
    inputs = example()
    fixed = name in FIXED
    if fixed:
        inputs = tuple(x[:1].repeat_interleave(BATCH, 0) for x in inputs)
    # Layers are unrolled by number of steps.
    open_sequence = not inputs[0].is_floating_point() and len(inputs) == 1
    if exporter == "dynamo":
        axes = {0: torch.export.Dim("batch")}
        if open_sequence:
            axes[1] = torch.export.Dim("sequence", min=9, max=32)
        torch.onnx.export(module, inputs, path, dynamo=True, opset_version=18,
                          dynamic_shapes=(None if fixed else
                                          (axes,) * len(inputs)),
                          external_data=False, verbose=False)
    else:
        axes = {0: "batch", 1: "sequence"} if open_sequence else {0: "batch"}
        names = ["source", "tokens"] if len(inputs) > 1 else ["input"]
        torch.onnx.export(module, inputs, path, dynamo=False, opset_version=17,
                          input_names=names,
                          dynamic_axes=({} if fixed else
                                        {name: axes for name in names}),
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

    def __init__(self, examples, work):
        example = examples[0]
        self.pairs = len(examples) == 2
        if not example.is_floating_point():
            self.path = TEXT
            self.tokens = np.frombuffer(TEXT.read_bytes(), dtype=np.uint8)
            self.width = len(examples) * SEQ_LEN
            self.count = (len(self.tokens) - 1) // self.width
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
        """The model's inputs, and the labels."""
        rows = []
        for sample in range(step * BATCH, (step + 1) * BATCH):
            key = mix64(mix64(SEED) ^ (sample // self.count))
            rows.append(permuted(key, sample % self.count, self.count))
        if self.tokens is None:
            return ([self.images[rows]],
                    self.labels[rows, 0].astype(np.int64))
        parts = np.array([self.tokens[row * self.width:
                                      (row + 1) * self.width + 1]
                          for row in rows]).astype(np.int64)
        if self.pairs:
            labels = parts[:, SEQ_LEN:-1]
            shifted = np.pad(labels, ((0, 0), (1, 0)))[:, :-1]
            return [parts[:, :SEQ_LEN], shifted], labels
        return [parts[:, :-1]], parts[:, 1:]


# ---- Weights -------------------------------------------------------------------

class Parameters:
    """A module's numbers, found in a file by their values."""

    def __init__(self, module):
        self.parameters = list(module.parameters())
        values = self.joint([p.detach() for p in self.parameters])
        self.order = np.argsort(values)
        self.sorted = values[self.order]

    @staticmethod
    def joint(tensors):
        return np.concatenate([t.numpy().ravel() for t in tensors])

    def places(self, array):
        """Of each element its place in joint(…), or None where it has none."""
        at = np.searchsorted(self.sorted, array).clip(max=len(self.sorted) - 1)
        if not np.array_equal(self.sorted[at], array):
            return None
        return self.order[at]


# ---- Training ------------------------------------------------------------------

def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def outputs_and_labels(module, batch):
    inputs, labels = batch
    inputs = [torch.from_numpy(array) for array in inputs]
    if next(module.parameters()).dtype == torch.float64:
        # Pixels, as exactly as they are read.
        inputs = [((x.double() + 1) * 127.5).round() / 127.5 - 1
                  for x in inputs]
    return module(*inputs), torch.from_numpy(labels)


def train(module, samples, steps):
    decays = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    optimizer = adamw(decays, others)
    losses = []
    for step in range(steps):
        loss = loss_of(*outputs_and_labels(module, samples.batch(step)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def outputs(args, path, given, work):
    """Tessera's of what `given` has by input, in their order."""
    for i, array in enumerate(given.values()):
        kind = np.float32 if array.dtype.kind == "f" else np.int32
        (work / f"{i}.in").write_bytes(array.astype(kind).tobytes())
    is_text = all(array.dtype.kind != "f" for array in given.values())
    sizes = [str(BATCH), str(SEQ_LEN) if is_text else "0"]
    done = subprocess.run([args.outputs, path, work, *sizes], check=True,
                          stdout=subprocess.PIPE, text=True)
    return [np.frombuffer((work / f"{i}.out").read_bytes(), np.float32).reshape(
        [int(extent) for extent in line.split()])
        for i, line in enumerate(done.stdout.split("\n")[:-1])]


def relative(found, expected, least=1e-6):
    """What is zero but for rounding is as good as zero."""
    size = max(np.linalg.norm(expected), least)
    return float(np.linalg.norm(found - expected) / size)


def keep_one_bias(module):
    """Tessera trains the sum of a recurrent layer's two biases, but for a GRU's
    candidate. Of the second ones no gradient is kept of the same rows; by name
    they are returned, as masks."""
    rows = {}
    for prefix, part in module.named_modules():
        if not isinstance(part, (nn.LSTM, nn.GRU, nn.RNN)):
            continue
        for name, bias in part.named_parameters():
            if not name.startswith("bias_hh"):
                continue
            summed = torch.ones_like(bias, dtype=torch.bool)
            if isinstance(part, nn.GRU):
                summed[-part.hidden_size:] = False
            bias.register_hook(
                lambda gradient, summed=summed: gradient * ~summed)
            rows[f"{prefix}.{name}"] = summed.numpy()
    return rows


def gradients(module, samples):
    """Of the first step's loss, one behind the other."""
    loss_of(*outputs_and_labels(module, samples.batch(0))).backward()
    joint = Parameters.joint([torch.zeros_like(p) if p.grad is None else p.grad
                              for p in module.parameters()])
    module.zero_grad()
    return joint


def compare(args, name, work):
    path = work / (name + ".onnx")
    module = export(name, path)
    samples = Samples(MODELS[name][1](), work)
    strategy = f"dp=2,tp=2,mbs={BATCH // 2}"
    dtype = "fp64" if name in WIDE else "fp32"

    def tessera(*more):
        return json.loads(subprocess.run(
            [args.tessera, "run", "--model", path, "--load", path, "--data",
             samples.path, "--dtype", dtype, "--global-batch", str(BATCH),
             "--seed", str(SEED), "--nproc", "4", "--strategy", strategy,
             "--json", *more] +
            (["--seq-len", str(SEQ_LEN)] if samples.path == TEXT else []),
            check=True, stdout=subprocess.PIPE, text=True).stdout)

    nodes = len(onnx.load(path).graph.node)
    inputs, labels = samples.batch(0)
    session = onnxruntime.InferenceSession(
        path, providers=["CPUExecutionProvider"])
    given = {of.name: array
             for of, array in zip(session.get_inputs(), inputs)}
    expected = session.run(None, given)
    found = outputs(args, path, given, work)
    worst_output = max(map(relative, found, expected))

    steps = min(args.steps, 1 if name in ONE_STEP else 3 if name in WIDE else
                args.steps)
    own = tessera("--steps", str(steps), "--lr", "1e-3")["losses"]
    # The weights then are what they were, less so many gradients.
    rate = 100
    tessera("--steps", "1", "--optimizer", "sgd", "--lr", str(rate), "--clip",
            "0", "--export", work / "moved")
    moved = load_file(work / "moved" / "model.safetensors")
    parameters = Parameters(module)
    if name in WIDE:
        module.double()
    rows = keep_one_bias(module)
    expected = gradients(module, samples)
    found = np.zeros_like(expected)
    graph = onnx.load(path).graph
    # They have no gradients.
    averages = {name for node in graph.node
                if node.op_type == "BatchNormalization"
                for name in node.input[3:5]}
    for average in averages:
        moved.pop(average, None)
    matrices = []
    for tensor in graph.initializer:
        if tensor.name not in moved:
            continue
        old = numpy_helper.to_array(tensor)
        new = moved.pop(tensor.name)
        if any(np.array_equal(old, matrix.T) for matrix in matrices):
            continue  # the same one once more
        if old.ndim == 2:
            matrices.append(old)
        if name in FIXED and old.ndim > 1 and (old == old[0]).all():
            old, new = old[:1], new[:1]  # one row, written for each sample
        places = parameters.places(old)
        if places is None:
            sys.exit(f"{name}: no parameter has the numbers of '{tensor.name}'")
        # A number may stand in several places of the file.
        np.add.at(found, places, (old - new) / rate)
    if moved:
        sys.exit(f"{name}: not in the file: {moved.keys()}")
    by_name = {}
    at = 0
    for of, p in module.named_parameters():
        by_name[of] = slice(at, at + p.numel())
        at += p.numel()
    for second, summed in rows.items():
        # The sum lies in the first, and 0 in the second.
        first = by_name[second.replace("bias_hh", "bias_ih")]
        second = by_name[second]
        found[first][summed] += found[second][summed]
        found[second][summed] = 0
    differences = {of: relative(found[at], expected[at],
                                0.01 * np.linalg.norm(expected))
                   for of, at in by_name.items()}
    worst = max(differences, key=differences.get)
    other = train(module, samples, steps)
    return {"nodes": nodes, "tessera": own, "pytorch": other,
            "difference_of_output": worst_output,
            "difference_of_loss": max(abs(a - b) / b
                                      for a, b in zip(own, other)),
            "difference_of_gradient": differences[worst],
            "worst_gradient": worst}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera", nargs="?")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--write")
    args = parser.parse_intermixed_args()
    if args.write:
        for name in [args.tessera] + args.models if args.tessera else MODELS:
            path = pathlib.Path(args.write) / (name + ".onnx")
            export(name, path)
            onnx.save(stripped(onnx.load(path)), path)
        return
    tessera = pathlib.Path(args.tessera).resolve()
    args.tessera = str(tessera)
    args.outputs = str(tessera.parent / "tests/tessera_onnx_outputs")
    results = {}
    for name in args.models or MODELS:
        with tempfile.TemporaryDirectory() as work:
            results[name] = compare(args, name, pathlib.Path(work))
    print(json.dumps(results, indent=1))
    sys.exit(not all(r["difference_of_" + of] <= TOLERANCE
                     for of in ("output", "loss", "gradient")
                     for r in results.values()))


if __name__ == "__main__":
    main()
