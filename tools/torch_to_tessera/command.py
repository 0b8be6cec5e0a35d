"""The command: flags, messages, files."""

import argparse
import math
import os
import pathlib
import sys

from .export import export
from .graph import text_of
from .nodes import module_path, operator_name, source_line
from .problems import refuse
from .weights import weights_of, write_safetensors

MOST_NAMES = 4  # that a line lists


def parser(description=None):
    made = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("model")
    made.add_argument("-o", "--out", default="graph.json",
                      help="file to write (default: graph.json)")
    made.add_argument("--loss", action="store_true",
                      help="add the mean cross-entropy of the output")
    made.add_argument("--output", type=int, default=0,
                      help="which of the model's outputs (default: 0)")
    made.add_argument("--global-batch", type=int, default=8,
                      help="samples of a step (default: 8)")
    made.add_argument("--seq-len", type=int, default=0,
                      help="tokens of a sample, of a Hugging Face model")
    made.add_argument("--source-len", type=int, default=0,
                      help="of its encoder, where it is another")
    made.add_argument("--image-size", type=int, default=0,
                      help="of a model whose config does not say")
    made.add_argument("--dtype", default="fp32",
                      choices=["fp64", "fp32", "bf16", "fp16"],
                      help="of parameters and activations (default: fp32)")
    made.add_argument("--expert-capacity-factor", type=float, default=0,
                      help="slots of an expert, as a share of those it needs "
                      "when all get as many tokens; 0: none is dropped")
    made.add_argument("--batch-norm-groups", type=int, default=1,
                      help="groups of a microbatch's samples, each with batch "
                      "norm's\nstatistics of its own, as of so many replicas "
                      "(default: 1)")
    made.add_argument("--fx", action="store_true",
                      help="trace by torch.fx, not by torch.export")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                      help="another value of a key of the config")
    made.add_argument("--train-frozen", action="store_true",
                      help="train parameters that are frozen (requires_grad), "
                      "too")
    made.add_argument("--name", help="of the graph")
    made.add_argument("--weights", metavar="FILE",
                      help="write the module's parameters, too, as safetensors "
                      "that 'tessera run --load' reads")
    made.add_argument("--seed", type=int, default=0,
                      help="of parameters, for --weights")
    return made


def listed(names):
    return ", ".join(names[:MOST_NAMES]) + (", …" if names[MOST_NAMES:] else "")


def written(path, write):
    """The file at `path`, whole or not at all."""
    path = pathlib.Path(path)
    beside = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    try:
        write(beside)
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        print(f"{path}: {error.strerror}", file=sys.stderr)
        sys.exit(1)


def main(description=None):
    args = parser(description).parse_args()
    for path in filter(None, (args.out, args.weights)):
        folder = pathlib.Path(path).absolute().parent
        if not os.access(folder, os.W_OK):
            refuse(f"{path}: cannot write into {folder}")
    if args.global_batch < 1:
        refuse(f"--global-batch {args.global_batch}: expected at least 1")
    if args.seq_len < 0:
        refuse(f"--seq-len {args.seq_len}: expected at least 1")
    if args.batch_norm_groups < 1 or args.global_batch % args.batch_norm_groups:
        refuse(f"--batch-norm-groups {args.batch_norm_groups}: expected a "
               f"divisor of the global batch, {args.global_batch}")
    graph, walk, module = export(args)
    for warning in walk.warnings:
        print(f"{args.model}: {warning}", file=sys.stderr)
    if graph is None:
        print(f"{args.model}: {len(walk.problems)} of {len(walk.traced.nodes)} "
              "nodes cannot be mapped:", file=sys.stderr)
        for node, problem in walk.problems:
            print(f"  {module_path(node) or '(top)'} ({operator_name(node)}, "
                  f"{source_line(node)}): {problem}", file=sys.stderr)
        sys.exit(2)
    used = {walk.graph.weights[t["name"]][0].name for t in graph["tensors"]
            if t["kind"] == "TENSOR_KIND_WEIGHT"}
    frozen = [name for name, parameter in module.named_parameters()
              if not parameter.requires_grad and name in used]
    if frozen:
        are = ("1 parameter is" if len(frozen) == 1 else
               f"{len(frozen)} parameters are")
        if not args.train_frozen:
            refuse(f"{args.model}: {are} frozen (requires_grad), and a graph "
                   f"file has none that are (--train-frozen: train them, too): "
                   f"{listed(frozen)}")
        print(f"{args.model}: {are} frozen (requires_grad), and trained like "
              f"the others: {listed(frozen)}", file=sys.stderr)
    unused = [name for name, _ in module.named_parameters()
              if name not in used]
    if unused:
        print(f"{args.model}: the loss does not depend on {', '.join(unused)}",
              file=sys.stderr)
    written(args.out, lambda path: path.write_text(text_of(graph)))
    if args.weights:
        weights = weights_of(graph, walk, module)
        written(args.weights, lambda path: write_safetensors(path, weights))
    trained = dict(module.named_parameters(remove_duplicate=False))
    count = sum(math.prod(t["shape"]) for t in graph["tensors"]
                if t["kind"] == "TENSOR_KIND_WEIGHT" and
                walk.graph.weights[t["name"]][0].name in trained)
    known = sum(len(t.get("values", ())) for t in graph["tensors"])
    print(f"{args.out}: {len(graph['nodes'])} operators in "
          f"{len(graph['blocks'])} blocks, {count:,} parameters" +
          (f", constants of {known:,} numbers" if known else ""))
