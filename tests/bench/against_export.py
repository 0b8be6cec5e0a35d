#!/usr/bin/env python3
"""Exports models of PyTorch by tools/export_torch.py and trains them by Tessera
and by PyTorch, on the CPU, from the module's own weights on the same samples
without dropout, and compares the first step's gradients and all losses.

usage: tests/bench/against_export.py TESSERA [--steps N] [MODEL…]

Prints one JSON object: for each model the losses, their largest relative
difference, and that of a gradient, by its norm (or a hundredth of that of all,
where that is larger); of batch norms also that of the running averages behind
the last step. Exit status 1 where one is above 1e-4, or a model has other
numbers of parameters in both.

    pip install torch transformers torchvision safetensors numpy
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import against_transformers
import edge_models
import image_models
import plain_models
from against_transformers import BATCH, SEED, SEQ_LEN, TEXT

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from torch_to_tessera import command  # noqa: E402
from torch_to_tessera.export import export  # noqa: E402
from torch_to_tessera.weights import (weights_of,  # noqa: E402
                                      write_safetensors)

TOLERANCE = 1e-4
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 64, "vocab_size": 256,
         "max_position_embeddings": 64}
GROUPED = {**SMALL, "num_key_value_heads": 2}
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4,
        "low_freq_factor": 1, "high_freq_factor": 4,
        "original_max_position_embeddings": 16}
# Experts of two of four groups, behind one layer without.
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
          "topk_group": 2, "n_shared_experts": 1, "moe_intermediate_size": 24,
          "first_k_dense_replace": 1, "mlp_layer_types": ["dense", "sparse"]}
LATENT = {**SMALL, **ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16,
          "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
          "num_key_value_heads": 4}
# Replicas with their own batch norms, as DDP has them: PyTorch's module is
# called with each one's samples by themselves.
REPLICAS = {"resnet18-replicas": 4}
# Configs by name; a number is the size of a torchvision model's images.
MODELS = {
    "gpt2": {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32,
             "n_positions": 64, "vocab_size": 256, "embd_pdrop": 0,
             "attn_pdrop": 0, "resid_pdrop": 0},
    "llama": {"model_type": "llama", **GROUPED, "rope_parameters": ROPE},
    "mistral": {"model_type": "mistral", **GROUPED, "sliding_window": 9},
    "mixtral": {"model_type": "mixtral", **GROUPED, "num_local_experts": 4},
    "qwen3": {"model_type": "qwen3", **GROUPED, "head_dim": 8},
    "qwen2_moe": {"model_type": "qwen2_moe", **GROUPED, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 48,
                  "shared_expert_intermediate_size": 40},
    "gemma": {"model_type": "gemma", **SMALL, "num_key_value_heads": 1,
              "head_dim": 8},
    "phi3": {"model_type": "phi3", **GROUPED, "pad_token_id": 0},
    "gpt_neox": {"model_type": "gpt_neox", **SMALL, "rotary_pct": 0.5},
    "opt": {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 256,
            "word_embed_proj_dim": 32, "max_position_embeddings": 64,
            "dropout": 0},
    "bloom": {"model_type": "bloom", "hidden_size": 48, "n_layer": 2,
              "n_head": 6, "vocab_size": 256, "hidden_dropout": 0,
              "attention_dropout": 0},
    "bert": {"model_type": "bert", **SMALL, "hidden_dropout_prob": 0,
             "attention_probs_dropout_prob": 0,
             "architectures": ["BertForMaskedLM"]},
    "t5": {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64,
           "num_layers": 2, "num_heads": 4, "vocab_size": 256,
           "dropout_rate": 0, "relative_attention_max_distance": 20,
           "relative_attention_num_buckets": 8},
    "t5-gated": {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64,
                 "num_layers": 2, "num_heads": 4, "vocab_size": 256,
                 "dropout_rate": 0, "feed_forward_proj": "gated-gelu",
                 "tie_word_embeddings": False},
    "vit": {"model_type": "vit", **SMALL, "image_size": 16, "patch_size": 4,
            "id2label": {str(i): str(i) for i in range(10)}},
    # The second of two blocks has shifted windows.
    "swin": {"model_type": "swin", "image_size": 32, "patch_size": 2,
             "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
             "window_size": 4, "drop_path_rate": 0.0,
             "id2label": {str(i): str(i) for i in range(10)}},
    "roberta": {"model_type": "roberta", **SMALL, "type_vocab_size": 1,
                "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    # One layer, three times.
    "albert": {"model_type": "albert", **SMALL, "embedding_size": 16,
               "type_vocab_size": 1, "num_hidden_layers": 3},
    "cohere": {"model_type": "cohere", **GROUPED},
    "cohere2": {"model_type": "cohere2", **GROUPED, "head_dim": 8,
                "sliding_window": 8},
    "olmo": {"model_type": "olmo", **GROUPED},
    "olmo2": {"model_type": "olmo2", **GROUPED},
    "mpt": {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 2,
            "vocab_size": 256, "max_seq_len": 64},
    "modernbert": {"model_type": "modernbert", **SMALL, "local_attention": 8,
                   "global_attn_every_n_layers": 2, "pad_token_id": 0},
    "gemma2": {"model_type": "gemma2", **GROUPED, "head_dim": 8,
               "sliding_window": 8},
    "gemma3": {"model_type": "gemma3_text", **GROUPED, "head_dim": 8,
               "sliding_window": 8},
    "glm": {"model_type": "glm", **GROUPED, "head_dim": 8, "pad_token_id": 0},
    "falcon": {"model_type": "falcon", **SMALL, "multi_query": True,
               "parallel_attn": True, "bias": False, "alibi": False,
               "new_decoder_architecture": False},
    "falcon-new": {"model_type": "falcon", **SMALL, "num_kv_heads": 2,
                   "new_decoder_architecture": True, "alibi": False},
    "deepseek_v2": {**LATENT, "model_type": "deepseek_v2",
                    "topk_method": "group_limited_greedy",
                    "routed_scaling_factor": 1.5},
    "deepseek_v2-greedy": {**LATENT, "model_type": "deepseek_v2",
                           "q_lora_rank": None},
    "deepseek_v3": {**LATENT, "model_type": "deepseek_v3"},
    "glm4_moe": {"model_type": "glm4_moe", **GROUPED, "head_dim": 8,
                 **ROUTED, "norm_topk_prob": False},
    "granite": {"model_type": "granite", **GROUPED},
    "nemotron": {"model_type": "nemotron", **GROUPED, "head_dim": 8},
    "phi": {"model_type": "phi", **GROUPED},
    "stablelm": {"model_type": "stablelm", **GROUPED},
    "starcoder2": {"model_type": "starcoder2", **GROUPED,
                   "residual_dropout": 0, "embedding_dropout": 0},
    "resnet18": 32,
    "resnet18-replicas": 64,
    "resnet50": 32,
    "resnext50_32x4d": 32,
    **image_models.MODELS,
}


WRITTEN = {**plain_models.MODELS, **edge_models.MODELS}
PLAIN = {name: kind for name, (_, kind) in WRITTEN.items()
         if kind != "texts"}  # of one label, which are not among the data


def plain(name):
    """What export_torch.py calls for it: MODULE:FUNCTION."""
    make, kind = WRITTEN[name]
    function = "make_" + name.replace("-", "_")
    setattr(plain_models, function, lambda: (
        make(), plain_models.example(kind, 2, SEQ_LEN)))
    return f"plain_models:{function}"


def largest(of, other):
    return max(abs(a - b) / b for a, b in zip(of, other))


def batches(args, kind, config, module, work):
    """Step -> what the module's forward is given, and the labels."""
    if kind == "images":
        from against_onnx import Samples
        samples = Samples([args.image], work)

        def images(step):
            [pixels], labels = samples.batch(step)
            pixels, labels = map(torch.from_numpy, (pixels, labels))
            if not pixels.is_floating_point():
                return pixels, labels
            whole = ((pixels.double() + 1) * 127.5).round()
            return whole / 127.5 - 1, labels

        return samples.path, images
    tokens = np.frombuffer(TEXT.read_bytes(), dtype=np.uint8)
    rows = against_transformers.Rows(tokens, config)

    def batch(step):
        given = rows.batch(step)
        given.pop("next_sentence_label", None)
        labels = given.pop("labels")
        if kind == "plain":
            given = {"tokens": given["input_ids"]}
        if kind == "pairs":
            given = {"source": given["input_ids"],
                     "tokens": F.pad(labels, (1, 0))[:, :-1]}
        if kind == "t5":
            given["decoder_input_ids"] = F.pad(labels, (1, 0))[:, :-1]
        return given, labels

    return TEXT, batch


@torch.no_grad()
def tensors_with(module, recipe, values):
    """Tessera's weights as if the parameters had other values."""
    weights = {p: p.clone() for p in module.parameters()}
    for p in weights:
        p.copy_(values[p])
    tensors = {name: t.clone() for name, t in recipe().items()}
    for p, weight in weights.items():
        p.copy_(weight)
    return tensors


def train(module, batch, steps, recipe, replicas):
    """The losses, and Tessera's tensors of the first step's momenta."""
    decays = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    optimizer = against_transformers.adamw(decays, others)
    losses = []
    for step in range(steps):
        given, labels = batch(step)
        kind = next(module.parameters()).dtype
        outs = [module(**given)] if isinstance(given, dict) else [
            module(own.to(kind) if own.is_floating_point() else own)
            for own in given.chunk(replicas)]
        logits = torch.cat([getattr(out, "logits", out) for out in outs])
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step == 0:
            # What a view adds to a weight it does not add to a gradient.
            large = 1e6  # beside it
            state = {p: optimizer.state[p].get("exp_avg", 0 * p) * large
                     for p in module.parameters()}
            moved = tensors_with(module, recipe, state)
            zero = tensors_with(module, recipe, {p: 0 * p for p in state})
            momenta = {name: (moved[name] - zero[name]) / large
                       for name in moved}
        optimizer.zero_grad()
    return losses, momenta


def compare(args, name, work):
    if name in PLAIN:
        kinds = {"tokens": "plain", "pairs": "pairs"}
        config = {"model_type": kinds.get(PLAIN[name], "images")}
    else:
        config = MODELS[name]
    replicas = REPLICAS.get(name, 1)
    own_model = isinstance(config, tuple)
    images = own_model or isinstance(config, int) or (
        config["model_type"] in ("vit", "swin", "images"))
    flags = ["--loss", "--global-batch", str(BATCH), "--weights",
             str(work / "weights"), "-o", str(work / "graph.json")]
    # Batch norms of few samples, one behind another, make the most of what is
    # rounded: these in fp64, and for a few steps.
    wide = isinstance(config, (int, tuple))
    steps = min(args.steps, 3) if wide else args.steps
    if own_model:
        args.image = config[1]()
        model = f"image_models:{name}"
        flags += ["--dtype", "fp64"]
    elif wide:
        args.image = torch.zeros(1, 3, config, config)
        model = f"torchvision:{name.removesuffix('-replicas')}"
        flags += ["--batch-norm-groups", str(replicas)]
        flags += ["--image-size", str(config), "--dtype", "fp64"]
    elif name in PLAIN:
        inputs = plain_models.example(PLAIN[name], 1, SEQ_LEN)
        args.image = next(iter(inputs.values()))
        model = plain(name)
    else:
        size = config.get("image_size", 1)
        args.image = torch.zeros(1, 3, size, size)
        model = str(work)
        (work / "config.json").write_text(json.dumps(config))
        flags += ["--seq-len", str(SEQ_LEN)]
    parsed = command.parser().parse_args([model, *flags])
    graph, walk, module = export(parsed)
    if graph is None:
        return {"problems": [text for _, text in walk.problems]}
    restore_experts(module)
    if wide:
        module.double()
    pathlib.Path(parsed.out).write_text(json.dumps(graph))
    recipe = lambda: weights_of(graph, walk, module)
    write_safetensors(parsed.weights, recipe())
    kind = "images" if images else config["model_type"]
    data, batch = batches(args, kind, None if images and not own_model else
                          config, module, work)

    def tessera(steps, *more):
        return json.loads(subprocess.run(
            [args.tessera, "run", "--model", parsed.out, "--load",
             parsed.weights, "--data", data, "--steps", str(steps), "--seed",
             str(SEED), "--lr", "1e-3", "--json", *more],
            check=True, stdout=subprocess.PIPE, text=True).stdout)

    # A batch norm is one of a microbatch.
    own = tessera(steps, "--nproc", "4", "--strategy",
                  f"dp=2,tp=2,mbs={BATCH // 2}", "--save",
                  str(work / "last"))["losses"]
    tessera(1, "--strategy", f"mbs={BATCH}", "--save", str(work / "saved"))
    saved = load_file(work / "saved")
    other, momenta = train(module, batch, steps, recipe, replicas)
    gradients = {}
    all_of = sum(m.norm().item() ** 2 for m in momenta.values()) ** 0.5
    trained = dict(module.named_parameters(remove_duplicate=False))
    source = lambda weight: walk.graph.weights[weight][0].name
    averages = [weight for weight in momenta if source(weight) not in trained]
    for weight in averages:
        del momenta[weight]
    for weight, expected in momenta.items():
        found = saved["optimizer.m." + weight].reshape(expected.shape)
        # A gradient that is zero but for rounding, such as that of the biases
        # of keys, is as good as zero.
        size = max(expected.norm().item(), 0.01 * all_of)
        gradients[weight] = (found - expected).norm().item() / size
    used = {source(weight) for weight in momenta}
    count = sum(p.numel() for n, p in module.named_parameters() if n in used)
    worst = max(gradients, key=gradients.get)
    more = {}
    # (DDP keeps the first replica's, Tessera the mean of all.)
    if averages and replicas == 1:
        last = load_file(work / "last")
        expected = recipe()
        def difference(name):
            # Where the means are zero but for rounding they are as good as
            # zero, beside variances that start as 1.
            found = last[name].reshape(expected[name].shape)
            size = max(expected[name].norm().item(),
                       0.01 * found.numel() ** 0.5)
            return (found - expected[name]).norm().item() / size

        more["largest_difference_of_average"] = max(map(difference, averages))
    return {"tessera": own, "pytorch": other, **more,
            "parameters": [sum(t.numel() for t in momenta.values()), count],
            "largest_difference": largest(own, other),
            "largest_difference_of_gradient": [worst, gradients[worst]]}


def restore_experts(module):
    for part in module.modules():
        part.__dict__.pop("forward", None)


def is_good(result):
    return ("problems" not in result and
            len(set(result["parameters"])) == 1 and
            result["largest_difference"] <= TOLERANCE and
            result.get("largest_difference_of_average", 0) <= TOLERANCE and
            result["largest_difference_of_gradient"][1] <= TOLERANCE)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    args.tessera = str(pathlib.Path(args.tessera).resolve())
    results = {}
    for name in args.models or [*MODELS, *PLAIN]:
        with tempfile.TemporaryDirectory() as work:
            results[name] = compare(args, name, pathlib.Path(work))
    print(json.dumps(results, indent=1))
    sys.exit(not all(map(is_good, results.values())))


if __name__ == "__main__":
    main()
