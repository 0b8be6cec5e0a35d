#!/usr/bin/env python3
"""Writes a PyTorch model as a graph file, which Tessera reads (--model FILE).

usage: tools/export_torch.py MODEL [--loss] [-o FILE.json] [more flags]

MODEL is MODULE:FUNCTION of Python, which returns a torch.nn.Module and an
example of its inputs (a tensor, a tuple, or a dict by name; the first dimension
is the batch); or a Hugging Face config (a config.json, its folder, the id of a
model); or torchvision:NAME. The model is traced by torch.export, or where that
fails by torch.fx; parameters take no memory, buffers do. Nothing is trained or
downloaded but the config of an id.

The name of a node is the path of the module that computes it, and, where that
is not all the module does, what it is behind a slash: "h.0.attn.c_proj",
"h.0/add". The name of a weight is the parameter's; "NAME/1" is the second of
the parts that a fused one is cut into. A block is a member of the outermost
list of modules alike.

What cannot be mapped is named, all of it at once, with module and source line;
the exit status is then 2. A row of OPERATORS is an operator of PyTorch.

    pip install torch [transformers] [torchvision]
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib
import json
import math
import operator
import os
import pathlib
import re
import struct
import sys

import torch
from torch import nn

MOST_WALKS = 100          # to find what is behind problems
TRACED_BATCH = 2          # the graph has --global-batch instead
MOST_ELEMENTS = 1 << 31   # of a constant
MOST_DIMENSIONS = 6       # of a tensor of a graph (planner/ir/index_rule.h)
HIDDEN = -1e4             # what is added to masked scores is below
# Where functions of one operand are told apart.
POINTS = torch.tensor([-4.3, -2.9, -2.1, -1.37, -0.71, -0.33, -0.05, 0.04, 0.29,
                       0.62, 1.17, 1.9, 2.6, 3.8, -9.0, 8.0, -27.0, 29.0, -80.0,
                       85.0], dtype=torch.float64)
UNBOUNDED = torch.finfo(torch.float32).max
FUNCTIONS = {
    "relu": torch.relu,
    "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "gelu_erf": nn.functional.gelu,
    "silu": nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "hard_sigmoid": nn.functional.hardsigmoid,
    "hard_swish": nn.functional.hardswish,
    "tanh": torch.tanh,
    "softplus": nn.functional.softplus,
    "abs": torch.abs,
    "erf": torch.erf,
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
}
# Inputs by the names that models give them; the others by what they hold.
INPUTS = {"input_ids": "tokens", "decoder_input_ids": "tokens",
          "token_type_ids": "segments", "position_ids": "positions",
          "pixel_values": "images", "labels": "labels", "tokens": "tokens",
          "source": "source", "segments": "segments", "images": "images",
          "targets": "targets"}

# What inputs are called, and the nodes of a loss.
RESERVED = {*INPUTS.values(), "count", "loss", "patch_rows", "patches",
            "source_positions", "zeros"}


class Unmappable(Exception):
    """A node that has no counterpart; its text says why."""


def refuse(problem):
    print(problem, file=sys.stderr)
    sys.exit(2)


# ---- Values: what a node of PyTorch's graph computes ---------------------------

@dataclasses.dataclass(frozen=True)
class Atom:
    """A dimension of a tensor of Tessera's. A dimension of PyTorch's may be
    several of them, such as (heads, features), or none where its extent is 1."""
    name: str
    extent: int
    letter: str  # in rules, where it is free there


class Atoms:
    """Which atoms a later reshape takes apart, or a later slice cuts into
    tensors of their own: they are made in parts when the graph is walked
    again."""

    def __init__(self):
        self.splits, self.cuts, self.changed = {}, {}, False
        self.paired = set()  # whose neighbours a rotary embedding turns

    def make(self, name, extent, letter):
        if name not in self.splits:
            return [Atom(name, extent, letter)]
        outer = self.splits[name]
        return (self.make(name + ".0", outer, letter) +
                self.make(name + ".1", extent // outer, letter))

    def split(self, atom, outer):
        """The atom as (outer, the rest)."""
        if atom.name not in self.splits:
            self.splits[atom.name], self.changed = outer, True
        return self.make(atom.name, atom.extent, atom.letter)

    def pair(self, name):
        self.changed |= name not in self.paired
        self.paired.add(name)

    def in_halves(self, atoms):
        """What a layer makes instead of `atoms`, (pairs, 2) of features whose
        neighbours are turned: one dimension with the first of each pair in
        front of all second ones. And the order of the features of each."""
        made = []
        for atom in atoms:
            name = atom.name[:-2]
            if made and name in self.paired and atom.name == name + ".1" and (
                    made[-1][0].name == name + ".0"):
                pairs = made.pop()[0].extent
                made.append((Atom(name + "~", 2 * pairs, atom.letter),
                             [*range(0, 2 * pairs, 2),
                              *range(1, 2 * pairs, 2)]))
            else:
                made.append((atom, None))
        return made

    def cut(self, atom, start, stop):
        """Whether the piece is new."""
        places = self.cuts.setdefault(atom.name, {0, atom.extent})
        new = not {start, stop} <= places
        places |= {start, stop}
        self.changed |= new
        return new

    def pieces(self, atom):
        places = sorted(self.cuts[atom.name])
        return list(zip(places, places[1:]))


@dataclasses.dataclass
class Act:
    """A tensor of the graph as PyTorch sees it, and a function that is applied
    to each element: elementwise nodes are gathered until something else reads
    them, so that an operator is recognised however it is spelled."""
    tensor: str
    own: list               # the tensor's atoms
    dims: list              # PyTorch's dimensions, each a list of atoms
    samples: object = None  # f(POINTS); None: x itself
    last: object = None     # the node that was gathered last
    # Of that node: its name, and its operands, Acts and numbers. Read where no
    # operator computes the whole function.
    step: tuple = ()
    # Where it is cut: the atom, and (start, stop, its atoms by those of the
    # whole, Act) of each piece.
    cut: object = None
    pieces: tuple = ()

    @property
    def shape(self):
        return [extent(dim) for dim in self.dims]

    def viewed(self, dims):
        return dataclasses.replace(self, dims=dims)


@dataclasses.dataclass
class Param:
    """A parameter, and the views of it: (operator, arguments behind self)."""
    name: str
    shape: list
    views: tuple = ()
    part: str = ""  # of a slice of it, "/0:16"

    @property
    def label(self):
        return self.name + self.part


@dataclasses.dataclass
class Part:
    """Elements [start, stop) along a dimension, not yet a tensor of its own;
    `sign` -1: negated."""
    x: Act
    dim: int
    start: int
    stop: int
    dropped: bool = False  # the dimension, of one element
    sign: int = 1
    node: object = None  # that asks for it


@dataclasses.dataclass
class Turned:
    """x[start:stop] of the last dimension, or its halves swapped and the first
    negated, times a constant; with both, a rotary embedding."""
    x: Act
    start: int
    stop: int
    cos: object = None  # of the elements themselves
    sin: object = None  # of the swapped ones
    swapped: bool = False
    last: object = None  # the node that made it whole


@dataclasses.dataclass
class Neighbours:
    """Sums of the first and second features of each pair, times constants, of
    (…, pairs, 2); or the pairs as complex numbers."""
    x: Act
    terms: tuple = ()  # (which of both, sign, the constant)
    of_complex: object = None  # the constant that all are multiplied by


@dataclasses.dataclass
class Statistic:
    """g(mean of x^2 over the last dimension), g by samples."""
    x: Act
    samples: object
    steps: tuple = ()  # g as (node, operands), one of them None


@dataclasses.dataclass
class Normed:
    """x divided by its root mean square."""
    x: Act
    epsilon: float
    last: object
    of: Statistic


@dataclasses.dataclass
class Scores:
    """Attention's scores, or where `done` their softmax."""
    q: Act
    k: Act
    scale: float = 1
    mask: object = None
    bias: object = None
    done: bool = False
    last: object = None  # the node that made the product


@dataclasses.dataclass
class Bias:
    """Rows of a table by the distance of query and key."""
    table: Param
    buckets: torch.Tensor  # (queries, keys)
    mask: object = None


@dataclasses.dataclass
class Chosen:
    """Of the softmax of logits: all, the largest ones, or their sum."""
    logits: Act
    what: str = "all"
    top_k: int = 0
    renormalised: bool = False
    last: object = None  # the softmax


@dataclasses.dataclass
class Patches:
    """A convolution of an image's patches, until what reads it is known."""
    node: object
    arguments: tuple
    shape: list
    steps: tuple = ()


@dataclasses.dataclass
class States:
    """The last states of recurrent layers, an Act for each and each
    direction."""
    of: list


@dataclasses.dataclass
class Loss:
    tensor: str


UNKNOWN = object()  # of a node that could not be mapped


def extent(dim):
    return math.prod(atom.extent for atom in dim)


def flatten(dims):
    return [atom for dim in dims for atom in dim]


def is_same(atoms, others):
    return ([a for a in atoms if a.extent > 1] ==
            [a for a in others if a.extent > 1])


class Letters:
    def __init__(self):
        self.of = {}

    def __call__(self, atoms):
        for atom in atoms:
            if atom in self.of:
                continue
            free = (c for c in atom.letter + "fogdijkmnpqruvcazehw"
                    if c not in self.of.values())
            self.of[atom] = next(free, None)
            if self.of[atom] is None:
                raise Unmappable("a tensor of more dimensions than a rule has "
                                 "letters")
        return "".join(self.of[atom] for atom in atoms)


def letters_of(atoms):
    """Of an elementwise rule. What a block reads has the letters of lookups,
    norms and sums alike, so that the first of equal blocks is like the
    others."""
    letters = [atom.letter for atom in atoms]
    return "bsh" if letters == ["b", "s", "f"] else Letters()(atoms)


# ---- The graph -----------------------------------------------------------------

class Graph:
    """Tessera's graph while it is built (proto/graph.proto)."""

    def __init__(self, args, name):
        self.batch, self.dtype, self.name = args.global_batch, args.dtype, name
        self.tensors, self.nodes, self.paths = {}, {}, {}
        self.weights = {}  # tensor -> (Param, start and stop by dimension …)
        self.seq_len = 1
        self.salts = 0
        self.in_pairs = set()  # tensors whose features are in another order

    def extents(self, atoms):
        return [self.batch if a.letter == "b" else a.extent for a in atoms]

    def unique(self, name):
        unique, n = name, 0
        while unique in self.nodes or unique in self.tensors:
            n += 1
            unique = f"{name}.{n}"
        return unique

    def input(self, name, shape, dtype):
        if name not in self.tensors:
            self.tensors[name] = {
                "name": name, "kind": "TENSOR_KIND_INPUT", "shape": shape,
                "dtype": dtype, "sample_dim": 0}
        return name

    def weight(self, name, shape, source, stddev=0, constant=0):
        """`source`: what of the module it is, for weights_of."""
        if name in RESERVED:
            name += ".parameter"
        if name in self.tensors:
            if self.tensors[name]["shape"] != shape:
                raise Unmappable(
                    f"parameter '{name}' is read as {shape} and as "
                    f"{self.tensors[name]['shape']}")
            if self.weights[name] != source:
                raise Unmappable(f"parameter '{name}' is read in two forms, "
                                 "one of them turned or moved")
            return name
        self.tensors[name] = {
            "name": name, "kind": "TENSOR_KIND_WEIGHT", "shape": shape,
            "dtype": self.dtype, "init": {"stddev": stddev,
                                          "constant": constant},
            "weight_decay": stddev > 0 and len(shape) > 1}
        self.weights[name] = source
        return name

    def add(self, op, name, path, operands, rule, integers=(), sizes=None,
            alike=False, **attributes):
        """Adds a node and returns the names of its results. `sizes`: extents
        of letters that no operand has; `alike`: all results are of the graph's
        type, not the first alone."""
        name = self.unique(name)
        if self.in_pairs & set(operands):
            if op == "transpose":
                self.in_pairs.add(name)
            elif not op.startswith("attention"):
                raise Unmappable("reads what a rotary embedding of neighbours "
                                 "makes, which only attention may")
        sizes = dict(sizes or {})
        left, right = rule.replace("!", "").split("->")
        for letters, tensor in zip(re.split("[,+]", left), operands):
            sizes.update(zip(letters, self.tensors[tensor]["shape"]))
        results = []
        for k, letters in enumerate(right.split(",")):
            if not set(letters) <= set(sizes):  # taken apart in this walk
                raise Unmappable(f"'{rule}' does not fit its operands")
            shape = [sizes[letter] for letter in letters]
            if len(shape) > MOST_DIMENSIONS:
                raise Unmappable(f"needs a tensor of {len(shape)} dimensions, "
                                 f"and has at most {MOST_DIMENSIONS}")
            wide = "fp64" if self.dtype == "fp64" else "fp32"
            tensor = {"name": name if k == 0 else f"{name}:{k}",
                      "kind": "TENSOR_KIND_ACTIVATION", "shape": shape,
                      "dtype": "int32" if k in integers else
                      wide if (k and not alike) or not shape else self.dtype}
            if "b" in letters:
                tensor["sample_dim"] = letters.index("b")
            self.tensors[tensor["name"]] = tensor
            results.append(tensor["name"])
        self.paths[name] = path
        self.nodes[name] = {
            "name": name, "op": op, "rule": rule,
            "attributes": [{"name": key, "value": float(value)}
                           for key, value in sorted(attributes.items())],
            "operands": list(operands), "results": results}
        return results

    def check_parts(self, parameters):
        """Parts of a parameter are trained apart."""
        read = {}
        for name, (source, _) in self.weights.items():
            read.setdefault(source.name, []).append(
                math.prod(self.tensors[name]["shape"]))
        for name, counts in read.items():
            whole = parameters[name].numel() if name in parameters else None
            if whole is not None and sum(counts) > whole:
                raise Unmappable(f"parameter '{name}' is read in parts that "
                                 "overlap")

    def prune(self, loss):
        """Leaves what the loss depends on."""
        needed, nodes = {loss}, []
        for node in reversed(self.nodes.values()):
            if needed & set(node["results"]):
                nodes.insert(0, node)
                needed |= set(node["operands"]) | set(node["results"])
        self.nodes = {node["name"]: node for node in nodes}
        self.tensors = {name: tensor for name, tensor in self.tensors.items()
                        if name in needed}

    def json(self, loss, blocks):
        return {
            "schema_version": 1, "name": self.name,
            "global_batch": self.batch, "seq_len": self.seq_len,
            "dtype": self.dtype, "blocks": list(dict.fromkeys(blocks)),
            "tensors": list(self.tensors.values()),
            "nodes": [{**node, "block": block}
                      for node, block in zip(self.nodes.values(), blocks)],
            "loss": loss}


LAYERS = ("linear", "linear_fp32", "conv2d", "expert_linear", "embedding")


def members(module):
    """Those of a list of modules of one kind, by name; or none."""
    numbered = {name: child for name, child in module.named_children()
                if name.isdigit()}
    kinds = [type(child) for child in numbered.values()]
    alike = len(set(kinds)) < len(kinds) or isinstance(module, nn.ModuleList)
    return numbered if alike else {}


def repeats(module):
    """Whether some of a list's members are equal."""
    shapes = [(type(child), [p.shape for p in child.parameters()])
              for child in members(module).values()]
    return any(s[1] and s in shapes[:i] for i, s in enumerate(shapes))


def block_prefixes(module):
    """Paths of the members of each outermost list of modules alike, but for
    those of a list of stages, whose members have equal layers and differ."""
    prefixes = []

    def visit(path, parent):
        of_list = members(parent)
        stages = not repeats(parent) and any(
            repeats(part) for child in of_list.values()
            for part in child.modules())
        for name, child in parent.named_children():
            below = f"{path}.{name}" if path else name
            if name in of_list and not stages:
                prefixes.append(below)
            else:
                visit(below, child)

    visit("", module)
    return prefixes


def blocks_of(graph, module):
    """The block of each node. What stands between the members of lists is a
    block of its own, and so is each member that has a layer."""
    prefixes = set(block_prefixes(module))

    def prefix(path):
        parts = path.split(".")
        return next((p for n in range(1, len(parts) + 1)
                     if (p := ".".join(parts[:n])) in prefixes), None)

    runs = []  # [prefix, nodes]
    for name, node in graph.nodes.items():
        key = prefix(graph.paths[name])
        if not runs or runs[-1][0] != key:
            runs.append([key, []])
        runs[-1][1].append(node)
    if len(runs) == 1:
        runs = [[None, nodes] for nodes in single_tensor_cuts(graph)]
    merged = []
    for run in runs:
        layer = any(node["op"] in LAYERS for node in run[1])
        if merged and not (layer and merged[-1][2]):
            # Without a layer of its own it belongs to what is before it.
            if not merged[-1][2]:
                merged[-1][0] = run[0] or merged[-1][0]
            merged[-1][1] += run[1]
            merged[-1][2] |= layer
        else:
            merged.append([*run, layer])
    blocks, taken = [], set()
    for i, (key, nodes, _) in enumerate(merged):
        ends = {0: "embed", len(merged) - 1: "head"}
        name = key or ends.get(i) or nodes[0]["name"]
        while name in taken:
            name += "'"
        taken.add(name)
        blocks += [name] * len(nodes)
    return blocks


def single_tensor_cuts(graph):
    """Runs of nodes behind which a single tensor goes on."""
    nodes = list(graph.nodes.values())
    last = {t: i for i, node in enumerate(nodes) for t in node["operands"]}
    runs, alive = [[]], set()
    for i, node in enumerate(nodes):
        runs[-1].append(node)
        alive |= {t for t in node["results"] if last.get(t, -1) > i}
        alive = {t for t in alive if last[t] > i}
        if len(alive) == 1:
            runs.append([])
    return [run for run in runs if run]


# ---- Walking PyTorch's graph ---------------------------------------------------

class Walk:
    """One walk over the nodes. Where it takes an atom apart its graph is of no
    use, and another walk follows."""

    def __init__(self, traced, args, atoms, stands_in=False):
        """`stands_in`: nodes behind others that cannot be mapped are looked at,
        too, by tensors of the shapes that these make. Such a walk is of no use
        but for its problems."""
        self.traced, self.args, self.atoms = traced, args, atoms
        self.stands_in = stands_in
        self.graph = Graph(args, traced.name)
        self.values, self.problems, self.warnings = {}, [], {}
        self.made = {}    # functions and transposes that were applied
        self.reads = {}   # parameters as tensors
        # What nodes make that could not be mapped, and what is behind these.
        self.doubtful = set()
        self.of_layers = set()  # names of dense layers' nodes
        self.masks = {}   # constants that were told apart
        self.batch = self.atoms.make("batch", TRACED_BATCH, "b")[0]
        self.places = {}  # atom of a sequence -> its input of positions
        self.config = getattr(traced.module, "config", None)
        self.values.update(traced.values)
        for placeholder, name, tensor in traced.inputs:
            self.values[placeholder] = self.input(name, tensor)

    def input(self, name, tensor):
        """An input of the model, (batch, …)."""
        shape = list(tensor.shape)
        if not tensor.is_floating_point():
            own = [self.batch]
            for size in shape[1:]:
                of = "source" if name == "source" else "sequence"
                own += self.atoms.make(f"{of}.{len(own)}.{size}", size, "s")
            if name in ("tokens", "source"):
                self.places[own[-1]] = ("source_positions" if name == "source"
                                        else "positions")
            if name == "tokens" and len(shape) > 1:
                self.graph.seq_len = shape[1]
            self.graph.input(name, self.graph.extents(own), "int32")
            return Act(name, own, [[atom] for atom in own])
        if name == "targets":  # of a loss of elements
            own = [self.batch] + [
                self.atoms.make(f"{name}.{i}", size, "f")[0]
                for i, size in enumerate(shape[1:])]
            self.graph.input(name, self.graph.extents(own), self.args.dtype)
            return Act(name, own, [[atom] for atom in own])
        # Images, signals (batch, channels, length) or features.
        own = [self.batch] + [
            self.atoms.make(f"{name}.{letter}", size, letter)[0]
            for letter, size in zip("cw" if len(shape) == 3 else "chw",
                                    shape[1:])]
        self.graph.input(name, self.graph.extents(own), self.args.dtype)
        return Act(name, own, [[atom] for atom in own])

    def extra(self, name, atoms):
        """An input of whole numbers that the data has and the model lacks."""
        return self.graph.input(name, self.graph.extents(atoms), "int32")

    def run(self):
        for node in self.traced.nodes:
            if node in self.values:
                continue
            value, problem = self.tried(node)
            behind = self.doubtful & set(node.all_input_nodes)
            if problem and behind:
                value, problem = self.tried_by_itself(node, behind)
            if problem:
                self.problems.append((node, problem))
            if problem or behind:
                self.doubtful.add(node)
            self.values[node] = value
            target = getattr(node.target, "__name__", "").split(".")[0]
            if target.endswith("_") and not target.endswith("__"):
                self.values[node.args[0]] = value  # in place
        return self

    def tried(self, node):
        """(the value, None), or (what stands for it, what the problem is)."""
        try:
            return self.map(node), None
        except Unmappable as problem:
            return self.stand_in(node), str(problem)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError,
                ValueError) as error:
            return self.stand_in(node), (
                f"with these arguments is not known ({error!r})")

    def tried_by_itself(self, node, behind):
        """The same whatever the nodes `behind` others that could not be mapped
        make; no problem is named that may be theirs."""
        held = {n: self.values[n] for n in behind}
        if not all(isinstance(v, Act) for v in held.values()):
            return self.stand_in(node), None
        self.values.update({n: self.stand_in(n) for n in behind})
        tried = self.tried(node)
        self.values.update(held)
        return tried

    def stand_in(self, node):
        """A tensor for what could not be mapped, laid out as what reads it
        likes best: what is behind it is looked at, too."""
        def of(value, name):
            if not self.stands_in:
                return UNKNOWN
            if isinstance(value, (list, tuple)):
                return [of(v, f"{name}.{i}") for i, v in enumerate(value)]
            if not isinstance(value, torch.Tensor):
                return UNKNOWN
            dims, shape = [], list(value.shape)
            free = list(self.places)
            for d, size in enumerate(shape):
                place = next((a for a in free if d and a.extent == size), None)
                if d == 0 and size == TRACED_BATCH:
                    dims.append([self.batch])
                elif place:
                    free = []
                    dims.append([place])
                elif size == 1:
                    dims.append([])
                else:
                    image = len(shape) == 4 and not self.places
                    dims.append(self.atoms.make(
                        f"{name}.{d}", size, "bchw"[d] if image else "f"))
            own = flatten(dims)
            if len(dims) == 4 and self.places and dims[2] and (
                    dims[2][0] in self.places):
                own = flatten([dims[0], dims[2], dims[1], dims[3]])
            self.graph.input(name, self.graph.extents(own), self.args.dtype)
            return Act(name, own, dims)
        return of(node.meta.get("val"), f"?{node.name}")

    # ---- operands

    def of(self, argument):
        if isinstance(argument, torch.fx.Node):
            return self.values[argument]
        if isinstance(argument, (list, tuple)):
            return [self.of(item) for item in argument]
        return argument

    def map(self, node):
        if node.op == "get_attr":
            return self.traced.attribute(node)
        if node.op == "placeholder":
            raise Unmappable("an input that is no tensor")
        operands = [self.of(a) for a in node.args]
        keywords = {key: self.of(a) for key, a in node.kwargs.items()}
        every = torch.utils._pytree.tree_leaves([operands, keywords])
        if any(value is UNKNOWN for value in every):
            return UNKNOWN  # said where it is made
        if node.target is operator.getitem:
            return operands[0][operands[1]]
        if all(is_constant(value) for value in every):
            return fold(node, operands, keywords)
        name = operator_name(node)
        handler = OPERATORS.get(name)
        if handler is None:
            raise Unmappable(f"no operator of Tessera's is known for {name}")
        return handler(self, node, *operands, **keywords)

    def tensor(self, value, what="operand"):
        """`value` as a tensor of the graph, with what is gathered applied."""
        if isinstance(value, Part):
            value = self.cut_off(value)
        if isinstance(value, Patches):
            key = "patches", value.node
            if key not in self.made:
                self.made[key] = convolution(self, value.node,
                                             *value.arguments)
            image = self.made[key]
            dims = image.dims
            if value.steps:
                dims = [dims[0], dims[1], dims[2] + dims[3]]
            if "turned" in value.steps:
                dims = [dims[0], dims[2], dims[1]]
            value = image.viewed(dims)
        if isinstance(value, Turned) and value.last is not None:
            value = rotary(self, value.last, value, value.stop)
        if isinstance(value, Param):
            value = self.read(value)
        if isinstance(value, Chosen) and value.what == "all":
            value = softmax_of(self, value.last, value.logits,
                               len(value.logits.dims) - 1)
        if isinstance(value, Scores):
            value = written_out(self, value)
        if isinstance(value, (Statistic, Normed)):
            value = mean_square(self, value)
        if not isinstance(value, Act):
            raise Unmappable(f"{what} is {described(value)}")
        if value.pieces:
            raise Unmappable(f"{what} is read whole and in pieces")
        if value.samples is None:
            return value
        key = (value.tensor, value.samples.numpy().tobytes())
        if key not in self.made:
            self.made[key] = self.apply(value)
        return dataclasses.replace(value, tensor=self.made[key], samples=None,
                                   last=None)

    def apply(self, x):
        """The tensor of x with its function: by one operator, or else by one
        for each of its steps."""
        letters = letters_of(x.own)

        def add(op, operands, **attributes):
            rule = ",".join([letters] * len(operands))
            return self.add(op, x.last, operands, f"{rule}->{letters}",
                            path=module_path(x.last), **attributes)[0]

        with contextlib.suppress(Unmappable):
            op, attributes = function_of(x.samples)
            return add(op, [x.tensor], **attributes)
        name, operands = x.step
        return by_steps(add, name, [
            self.tensor(v).tensor if isinstance(v, Act) else v
            for v in operands])

    def plain(self, value, what="operand"):
        """The same, where its dimensions are in the tensor's order."""
        x = self.tensor(value, what)
        atoms = flatten(x.dims)
        if is_same(atoms, x.own):
            return x
        if not is_same(sorted_atoms(atoms, x.own), x.own):
            raise Unmappable(f"{what} is broadcast")
        order = atoms + [a for a in x.own if a not in atoms]
        key = (x.tensor, tuple(order))
        if key not in self.made:
            letters = Letters()
            self.made[key] = self.graph.add(
                "transpose", f"{x.tensor}/transpose",
                self.graph.paths.get(x.tensor, ""), [x.tensor],
                f"{letters(x.own)}->{letters(order)}")[0]
        return dataclasses.replace(x, tensor=self.made[key], own=order)

    def read(self, param):
        """A parameter that is no matrix of a layer, as a tensor."""
        key = param.label, repr(param.views)
        if key not in self.reads:
            dims = [self.atoms.make(f"{param.label}.{d}", size, "f")
                    if size > 1 else [] for d, size in enumerate(param.shape)]
            own = flatten(dims)
            weight = self.graph.weight(
                param.label, [a.extent for a in own], (param, ()),
                stddev=self.stddev(0.02) if len(list(filter(None, dims))) > 1
                else 0, constant=1)
            letters = Letters()(own)
            # A node of its own has the gradient, whatever reads the parameter.
            path = param.name.rpartition(".")[0]
            y = self.graph.add("scale", f"{param.label}/read", path, [weight],
                               f"{letters}->{letters}", factor=1)[0]
            self.reads[key] = Act(y, own, dims)
        return self.reads[key]

    def cut_off(self, part):
        """Some elements of a dimension, as a tensor; of a dense layer's
        features a layer of their own."""
        dim = part.x.dims[part.dim]
        if (len(dim) != 1 or part.x.samples is not None or
                dim[0].name.partition(".out")[0] not in self.of_layers or
                "/" in dim[0].name):
            return places(self, part)
        atom = dim[0]
        if not self.atoms.cut(atom, part.start, part.stop) and (
                not self.atoms.changed):
            return places(self, part)
        # This walk's graph is of no use. In the next one the layer makes
        # pieces, with dimensions of their own.
        layer = atom.name.partition(".out")[0] + ".out"
        dims = [flatten(self.atoms.make(
            f"{a.name}/{part.start}", part.stop - part.start if a == atom else
            a.extent, a.letter) if a.name.startswith(layer) else [a]
            for a in d) for d in part.x.dims]
        dims[part.dim:part.dim + 1] = [] if part.dropped else [dims[part.dim]]
        return Act(part.x.tensor, flatten(dims), dims)

    def contiguous(self, value, node, what="operand"):
        """The same, transposed where it is not."""
        x = self.tensor(value, what)
        wanted = flatten(x.dims)
        if is_same(wanted, x.own):
            return x
        return self.exact(x, node, what)

    def exact(self, value, node, what="operand"):
        """The same, and without atoms of 1 that it has no dimension of."""
        x = self.tensor(value, what)
        wanted = flatten(x.dims)
        for one in [a for a in x.own if a.extent == 1 and a not in wanted]:
            letters = Letters()
            letters.of = {letter: letter for letter in "def"}
            own = [a for a in x.own if a != one]
            rule = "".join(letters([a]) + "!" * (a == one) for a in x.own)
            y = self.add("reshape", node, [x.tensor], f"{rule}->{letters(own)}",
                         suffix="without", first=1, second=1, third=1)[0]
            x = dataclasses.replace(x, tensor=y, own=own)
        if wanted == x.own:
            return x
        if sorted(wanted, key=lambda a: a.name) != sorted(
                x.own, key=lambda a: a.name):
            raise Unmappable(f"{what} is broadcast")
        letters = Letters()
        y = self.add("transpose", node, [x.tensor],
                     f"{letters(x.own)}->{letters(wanted)}",
                     suffix="transpose")[0]
        return dataclasses.replace(x, tensor=y, own=wanted)

    def joined(self, x, node, dim):
        """x with dimension `dim` one atom: several are joined, one of 1 is
        made."""
        if len(x.dims[dim]) == 1:
            return x
        return self.apart(self.one(x, node, dim), node, dim)

    def along(self, x, node, dim, function):
        """What a function computes along a dimension that is several: they are
        joined for it."""
        parts = x.dims[dim]
        y = function(self.one(x, node, dim))
        return self.apart(y, node, dim, parts) if parts else y

    def one(self, x, node, dim):
        x = self.exact(x, node)
        parts = x.dims[dim]
        at = len(flatten(x.dims[:dim]))
        letters = Letters()
        letters.of = {letter: letter for letter in "def"}
        front, gone, behind = (letters(atoms) for atoms in (
            x.own[:at], parts, x.own[at + len(parts):]))
        gone = "".join(f"{letter}!" for letter in gone)
        size = extent(parts)
        y = self.add("reshape", node, [x.tensor],
                     f"{front}{gone}{behind}->{front}d!{behind}",
                     suffix="joined", sizes={"d": size}, first=size,
                     second=1, third=1)[0]
        made = Atom(f"{y}.joined", size, parts[0].letter if parts else "f")
        return Act(y, [*x.own[:at], made, *x.own[at + len(parts):]],
                   [*x.dims[:dim], [made], *x.dims[dim + 1:]])

    def apart(self, x, node, dim, parts=None):
        """x, of whose dimension `dim` the atom is new: where it is taken apart
        behind x, by a node of their own."""
        [atom] = x.dims[dim]
        if parts is None:
            parts = self.atoms.make(atom.name, atom.extent, atom.letter)
        if parts == [atom]:
            return x
        if len(parts) > 3:
            raise Unmappable("a dimension that is taken apart into "
                             f"{len(parts)} behind it")
        at = x.own.index(atom)
        letters = Letters()
        letters.of = {letter: letter for letter in "mdef"}
        front, behind = letters(x.own[:at]), letters(x.own[at + 1:])
        sizes = [part.extent for part in parts] + [1]
        made = "d!e!f!"[:2 * len(parts)]
        y = self.add("reshape", node, [x.tensor],
                     f"{front}m!{behind}->{front}{made}{behind}",
                     suffix="apart", sizes=dict(zip("def", sizes)),
                     first=sizes[0], second=sizes[1], third=sizes[2])[0]
        return Act(y, [*x.own[:at], *parts, *x.own[at + 1:]],
                   [*x.dims[:dim], parts, *x.dims[dim + 1:]])

    # ---- nodes

    def add(self, op, node, operands, rule, path=None, suffix=None, **more):
        path = module_path(node) if path is None else path
        name = path
        if suffix is not None or not self.traced.is_leaf(path):
            name = f"{path}/{suffix or op}" if path else suffix or op
        return self.graph.add(op, name, path, operands, rule, **more)

    def lookup(self, node, table, rows, width, source, ids, suffix, name=None):
        """Rows of a table by an input of whole numbers."""
        weight = self.graph.weight(name or table.label, [rows, width], source,
                                   stddev=self.stddev(0.02))
        return self.add("embedding", node, [ids, weight], "bs,vh->bsh",
                        suffix=suffix)[0]

    def sequence_of(self, length):
        found = [atom for atom in self.places if atom.extent == length]
        if not found:
            raise Unmappable(f"no input is a sequence of {length} places")
        return found[0]

    def stddev(self, default):
        """How matrices start: as the config says, or by PyTorch's default."""
        return getattr(self.config, "initializer_range", None) or default

    def vector(self, param, shape, constant=0, suffix="", start=0, stop=None):
        size = math.prod(shape)
        if not isinstance(param, Param):
            raise Unmappable(f"expected a parameter, found {described(param)}")
        stop = param.shape[0] if stop is None else stop
        if param.shape != [param.shape[0]] or stop - start != size:
            raise Unmappable(f"parameter '{param.name}' has {param.shape}: "
                             f"expected {size} numbers")
        return self.graph.weight(param.label + suffix, shape,
                                 (param, (slice(start, stop),)),
                                 constant=constant)


def is_constant(value):
    return not isinstance(value, (Act, Param, Part, Turned, Statistic, Normed,
                                  Scores, Bias, Chosen, Patches, States,
                                  Neighbours, Loss))


def described(value):
    names = {Turned: "a part of a rotary embedding", Neighbours:
             "a part of a rotary embedding", Scores:
             "a product of two tensors, which only attention reads",
             Chosen: "a softmax, which only experts and the loss read",
             Param: "a parameter", Statistic: "a mean of squares",
             Normed: "a norm without a scale", Bias: "a bias of attention",
             States: "the states of several layers, of which one can be read"}
    return names.get(type(value), "a constant") + ": expected a tensor that " \
        "another node computes"


def operator_name(node):
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    if packet is None:
        return getattr(target, "__name__", str(target))
    return str(packet).removeprefix("aten.")


def module_path(node):
    stack = node.meta.get("nn_module_stack") or {}
    entries = list(stack.values())
    return entries[-1][0] if entries else ""


def source_line(node):
    """The line of the model's own code, outside of PyTorch."""
    lines = re.findall(r'File "([^"]+)", line (\d+)',
                       node.meta.get("stack_trace") or "")
    own = [line for line in lines
           if os.path.dirname(torch.__file__) not in line[0]] or lines
    return f"{own[-1][0]}:{own[-1][1]}" if own else "?"


def fold(node, operands, keywords):
    """A node of constants, computed."""
    target = node.target
    tags = getattr(target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        raise Unmappable("draws random numbers")
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.numel() > MOST_ELEMENTS:
        raise Unmappable(f"a constant of {value.numel()} elements, which is not "
                         "computed")
    if operator_name(node) == "_assert_tensor_metadata":
        return None
    name = getattr(target, "__name__", "").split(".")[0]
    if name.endswith("_") and not name.endswith("__"):
        operands = [operands[0].clone(), *operands[1:]]
    if "device" in keywords:
        keywords = {**keywords, "device": "cpu"}
    with torch.no_grad():
        result = target(*operands, **keywords)
    if isinstance(result, torch.Tensor) and result.is_meta:
        raise Unmappable("a constant without a value: build the module's "
                         "buffers on the CPU")
    return result


def function_of(samples):
    """The operator that computes a function, and its attributes."""
    for op, function in FUNCTIONS.items():
        if torch.allclose(samples, function(POINTS), rtol=2e-5, atol=2e-5):
            return op, {}
    factor = (samples[0] / POINTS[0]).item()
    if torch.allclose(samples, factor * POINTS, rtol=1e-6):
        return "scale", {"factor": factor}
    if torch.allclose(samples, nn.functional.leaky_relu(POINTS, factor),
                      rtol=1e-6):
        return "leaky_relu", {"slope": factor}
    least, most = samples.min(), samples.max()
    if torch.equal(samples, POINTS.clamp(least, most)):
        # Both bends are among the points (clamped).
        return "clip", {
            "least": -UNBOUNDED if least == POINTS.min() else least.item(),
            "most": UNBOUNDED if most == POINTS.max() else most.item()}
    raise Unmappable("no operator computes this function of one tensor")


# ---- Elementwise ---------------------------------------------------------------

def elementwise(walk, node, *operands, **keywords):
    """A function of one tensor is gathered; of two it is an operator."""
    name = operator_name(node).rstrip("_")
    if any(isinstance(v, Turned) for v in operands):
        return rotary_sum(walk, node, name, *operands)
    for kinds, handler in SPECIAL:
        if any(isinstance(value, kinds) for value in operands):
            return handler(walk, node, name, *operands, **keywords)
    operands = [walk.cut_off(v) if isinstance(v, Part) else
                walk.tensor(v) if isinstance(v, Patches) else v
                for v in operands]
    tensors = [v for v in operands if isinstance(v, Act)]
    x = tensors[0]
    alike = all(t.tensor == x.tensor and t.dims == x.dims for t in tensors)
    if not alike:
        return binary(walk, node, name, operands, **keywords)
    for constant in operands:
        if isinstance(constant, torch.Tensor) and number_of(constant) is None:
            return times_constant(walk, node, name, x, constant)
    given = [(v.samples if v.samples is not None else POINTS)
             if isinstance(v, Act) else number_of(v) for v in operands]
    samples = node.target(*(g.clone() if isinstance(g, torch.Tensor) else g
                            for g in given), **keywords)
    numbers = [v if isinstance(v, Act) else number_of(v) for v in operands]
    step = () if keywords else (name, tuple(numbers))
    return dataclasses.replace(x, samples=samples, last=node, step=step)


def by_steps(add, name, operands):
    """One elementwise node as an operator or two; tensors by name."""
    tensors = [v for v in operands if isinstance(v, str)]
    numbers = [v for v in operands if not isinstance(v, str)]
    if not tensors or not all(isinstance(v, (int, float)) for v in numbers):
        raise Unmappable("no operator computes this function of one tensor")
    x = tensors[0]
    pairs = {"add": "add", "sub": "subtract", "mul": "multiply",
             "div": "divide", "maximum": "maximum", "minimum": "minimum"}
    if name in pairs and len(tensors) == 2 and not numbers:
        return add(pairs[name], tensors)
    number = numbers[0] if numbers else None
    if name in ("abs", "cos", "erf", "exp", "log", "reciprocal", "relu",
                "sigmoid", "silu", "sin", "softplus", "sqrt", "tanh"):
        if not numbers:
            return add(name, [x])
    elif name == "neg":
        return add("scale", [x], factor=-1)
    elif name == "rsqrt":
        return add("power", [x], exponent=-0.5)
    elif name == "square":
        return add("multiply", [x, x])
    elif name == "pow" and operands[0] == x and len(numbers) == 1:
        return add("power", [x], exponent=number)
    elif len(operands) == 2 and len(numbers) == 1:
        first = operands[0] == x
        if name == "add":
            return add("offset", [x], amount=number)
        if name == "mul":
            return add("scale", [x], factor=number)
        if name == "sub" and first:
            return add("offset", [x], amount=-number)
        if name == "rsub" or name == "sub":
            return add("offset", [add("scale", [x], factor=-1)], amount=number)
        if name == "div" and first:
            return add("scale", [x], factor=1 / number)
        if name == "div":
            return add("scale", [add("reciprocal", [x])], factor=number)
    raise Unmappable("no operator computes this function of one tensor")


def clamped(walk, node, x, *bounds, **keywords):
    """Bounds that lie beyond what is sampled would not be seen."""
    if isinstance(x, Act):
        samples = x.samples if x.samples is not None else POINTS
        for bound in (*bounds, *keywords.values()):
            if (isinstance(bound, (int, float)) and math.isfinite(bound) and
                    not samples.min() < bound < samples.max()):
                raise Unmappable(f"a bound of {bound}, beyond where functions "
                                 "of one tensor are told apart")
    return elementwise(walk, node, x, *bounds, **keywords)


def number_of(value):
    """A constant's number, where it has one."""
    if isinstance(value, torch.Tensor):
        if value.numel() and bool((value == value.flatten()[0]).all()):
            return value.flatten()[0].item()
        return None
    return value


def part_elementwise(walk, node, name, *operands, **keywords):
    """A slice that is negated or turned, or else a tensor."""
    if name == "neg":
        return dataclasses.replace(operands[0], sign=-operands[0].sign)
    part, *other = sorted(operands, key=lambda v: not isinstance(v, Part))
    other = other[0] if other else None
    if (name == "mul" and isinstance(other, torch.Tensor) and part.dropped and
            number_of(other) is None and part.x.shape[part.dim] == 2 and
            part.dim + 1 == len(part.x.dims)):
        return Neighbours(part.x, ((part.start, part.sign, other),))
    if (name == "mul" and isinstance(other, torch.Tensor) and
            number_of(other) is None):
        return Turned(part.x, part.start, part.stop, cos=other)
    return elementwise(walk, node, *(
        walk.cut_off(v) if isinstance(v, Part) else v for v in operands),
        **keywords)


def times_constant(walk, node, name, x, constant):
    if name == "mul" and x.samples is None:
        return Turned(x, 0, x.shape[-1], cos=constant)
    raise Unmappable("computes with a constant of several numbers, which a graph "
                     "cannot have: only parameters, which are trained")


def binary(walk, node, name, operands, alpha=1):
    """Sums and products of tensors alike, in the order of residuals; else, where
    one is broadcast or turned, arithmetic."""
    try:
        return alike_binary(walk, node, name, operands, alpha)
    except Unmappable:
        if alpha != 1 or len(operands) != 2 or any(
                isinstance(v, torch.Tensor) for v in operands):
            raise
    return arithmetic(walk, node, name, *operands)


def arithmetic(walk, node, name, x, y):
    ops = {"add": "broadcast_add", "sub": "subtract", "mul": "multiply",
           "div": "divide", "maximum": "maximum", "minimum": "minimum"}
    if name not in ops:
        raise Unmappable("of two tensors only sums, differences, products, "
                         "quotients, the larger and the smaller are computed")
    x, y = walk.tensor(x), walk.tensor(y)
    dims = aligned(walk, node, [x, y])
    x, y = (v.viewed([[]] * (len(dims) - len(v.dims)) + v.dims)
            for v in (x, y))
    own = ordered(dims, [x, y])
    letters = Letters()
    to = letters(own)
    rules = [rule_of(v, dims, letters) for v in (x, y)]
    op = "add" if name == "add" and rules == [to, to] else ops[name]
    z = walk.add(op, node, [x.tensor, y.tensor], f"{rules[0]},{rules[1]}->{to}")
    return Act(z[0], own, dims)


def fit(walk, a, b):
    """Whether two dimensions are of the same atoms; where one is taken apart
    and the other is not, the other will be."""
    a, b = wide(a), wide(b)
    if extent(a) != extent(b):
        raise Unmappable(f"dimensions of {extent(a)} and {extent(b)} elements")
    for one, other in zip(a, b):
        if one.extent == other.extent:
            continue
        large, small = ((one, other) if one.extent > other.extent else
                        (other, one))
        if large.extent % small.extent:
            raise Unmappable("dimensions that are taken apart differently")
        walk.atoms.split(large, small.extent)
        break
    return [x.extent for x in a] == [x.extent for x in b]


def aligned(walk, node, tensors):
    """The dimensions of what is made of tensors that are broadcast."""
    rank = max(len(t.dims) for t in tensors)
    made, used = [], set()
    for d in range(rank):
        result = []
        for t in tensors:
            at = d - rank + len(t.dims)
            dim = t.dims[at] if at >= 0 else []
            if extent(dim) == 1:
                result = result or dim
            elif extent(result) == 1:
                result = dim
            elif fit(walk, result, dim):
                # Samples and places keep their names, and atoms of 1 stay.
                long, short = ((result, dim) if len(result) >= len(dim) else
                               (dim, result))
                of = dict(zip(*paired(long, short)))
                result = [of[a] if of.get(a, a).letter in "bs" else a
                          for a in long]
        # A tensor may stand beside itself turned.
        result = [a if a not in used else Atom(f"{node.name}.{d}.{i}",
                                               a.extent, "f")
                  for i, a in enumerate(result)]
        used |= set(result)
        made.append(result)
    return made


def ordered(dims, operands):
    """The atoms that operands have, in the order of the largest one, where that
    has them all."""
    atoms = held(dims, [[(t, t.dims[d]) for t in operands]
                        for d in range(len(dims))])
    for t in operands:
        if set(t.own) >= set(atoms):
            return [a for a in t.own if a in atoms]
    return atoms


def held(dims, sources):
    """The atoms of dimensions that a tensor has which they are made of, and that
    are not only repeated. `sources`: of each, (tensor, its dimension)."""
    atoms = []
    for dim, of_dim in zip(dims, sources):
        at = 0
        for atom in dim:
            if atom.extent == 1:
                found = any(atom in t.own for t, _ in of_dim)
            else:
                found = any(wide(of)[at] in t.own for t, of in of_dim
                            if len(wide(of)) > at)
                at += 1
            if found:
                atoms.append(atom)
    return atoms


def wide(dim):
    return [atom for atom in dim if atom.extent > 1]


def paired(dim, other):
    """The atoms of both, those of 1 only where both have them."""
    if [a.extent for a in dim] != [a.extent for a in other]:
        return wide(dim), wide(other)
    return dim, other


def rule_of(x, dims, letters):
    """The letters of x's tensor where x has the dimensions `dims`."""
    of = {}
    for mine, theirs in zip(x.dims, dims):
        mine, theirs = paired(mine, theirs)
        if [a.extent for a in mine] == [a.extent for a in theirs]:
            of.update(zip(mine, theirs))
    rule = ""
    for atom in x.own:
        if atom in of:
            rule += letters([of[atom]])
        elif any(atom in dim for dim in dims):
            rule += letters([atom])
        else:  # of extent 1, and the result lacks it
            rule += letters([atom]) + "!"
    return rule


def alike_binary(walk, node, name, operands, alpha=1):
    ops = {"add": "add", "mul": "multiply", "sub": "add"}
    if name not in ops or len(operands) != 2 or alpha != 1:
        raise Unmappable("of two tensors only sums, differences and products "
                         "are computed")
    x, y = operands
    if not isinstance(y, Act) or not isinstance(x, Act):
        raise Unmappable("a tensor and a constant of other dimensions")
    if name == "sub":
        samples = y.samples if y.samples is not None else POINTS
        y = dataclasses.replace(y, samples=-samples, last=node)
    x, y = walk.tensor(x), walk.tensor(y)
    rank = max(len(x.dims), len(y.dims))
    x, y = (t.viewed([[]] * (rank - len(t.dims)) + t.dims) for t in (x, y))
    # What is the same for all samples was made for each of them.
    fill = lambda t, u: t.viewed([
        [walk.batch] if not d and e == [walk.batch] and walk.batch in t.own
        else d for d, e in zip(t.dims, u.dims)])
    x, y = fill(x, y), fill(y, x)
    for whole, parts in ((x, y), (y, x)):
        for d, e in zip(whole.dims, parts.dims):
            if len(d) == 1 and len(e) > 1 and extent(d) == extent(e) and (
                    d[0] != walk.batch):
                walk.atoms.split(d[0], e[0].extent)
    if x.shape != y.shape:
        raise Unmappable(f"expected tensors of one shape, found {x.shape} and "
                         f"{y.shape}")
    if not all(is_same(flatten(t.dims), t.own) for t in (x, y)):
        raise Unmappable("one of them is transposed or broadcast")
    if [a.extent for a in x.own] != [a.extent for a in y.own]:
        if walk.atoms.changed:
            return x
        raise Unmappable("tensors whose dimensions are not those of each other")
    letters = letters_of(x.own)
    # The older one first, as residuals are, however a model spells it.
    made = list(walk.graph.tensors)
    x, y = sorted((x, y), key=lambda t: made.index(t.tensor))
    result = walk.add(ops[name], node, [x.tensor, y.tensor],
                      f"{letters},{letters}->{letters}")[0]
    return dataclasses.replace(x, tensor=result)


def identity(walk, node, x, *_, **__):
    return x


def detached(walk, node, x):
    if not is_constant(x):
        raise Unmappable("stops gradients, which are derived of all that the "
                         "loss depends on")
    return x


# ---- Norms ---------------------------------------------------------------------

def mean(walk, node, x, dims=None, keep=False, dtype=None):
    if isinstance(x, Act) and dims is not None:
        axes = sorted(d % len(x.dims) for d in dims)
        squared = node.args[0]
        while operator_name(squared) == "to":
            squared = squared.args[0]
        if (operator_name(squared) in ("pow", "mul", "square") and
                axes == [len(x.dims) - 1] and keep):
            base = walk.tensor(walk.of(squared.args[0]))
            of_base = dataclasses.replace(base, samples=POINTS)
            if torch.allclose(elementwise(walk, squared, *(
                    of_base if isinstance(a, torch.fx.Node) else a
                    for a in squared.args)).samples, POINTS ** 2):
                return Statistic(base, POINTS.abs())
        if len(x.dims) > 2 and axes == list(range(2, len(x.dims))):
            return image_mean(walk, node, x, keep)
    return reduction("reduce_mean")(walk, node, x, dims, keep)


def reduction(op):
    def reduced(walk, node, x, dims=None, keep=False, **_):
        x = walk.tensor(x)
        dims = range(len(x.dims)) if dims is None or dims == [] else (
            dims if isinstance(dims, (list, tuple)) else [dims])
        axes = {d % len(x.dims) for d in dims}
        gone = [a for d in axes for a in x.dims[d]]
        if not set(gone) <= set(x.own):
            raise Unmappable("a reduction over a dimension that is broadcast")
        if walk.batch in gone:
            raise Unmappable("its result is not of each sample, and batches "
                             "are cut into microbatches")
        own = [a for a in x.own if a not in gone]
        letters = Letters()
        whole = "!" if op == "reduce_max" else ""
        rule = "".join(letters([a]) + (whole if a in gone else "")
                       for a in x.own)
        y = walk.add(op, node, [x.tensor], f"{rule}->{letters(own)}")[0]
        made = [[] if d in axes else dim for d, dim in enumerate(x.dims)
                if keep or d not in axes]
        return Act(y, own, made)
    return reduced


def mean_square(walk, value):
    """The mean of squares, or a tensor divided by its root, as a tensor."""
    found = value.of if isinstance(value, Normed) else value
    node = found.steps[-1][0] if found.steps else value.last
    x = found.x
    square = walk.add("multiply", node, [x.tensor, x.tensor],
                      "{0},{0}->{0}".format(Letters()(x.own)),
                      suffix="square")[0]
    y = reduction("reduce_mean")(
        walk, node, dataclasses.replace(x, tensor=square), [-1], True)
    for node, operands in found.steps:
        y = elementwise(walk, node, *(y if v is None else v for v in operands))
    if isinstance(value, Normed):
        y = arithmetic(walk, value.last, "mul", x, y)
    return y


def statistic(walk, node, name, *operands, **keywords):
    """Functions of the mean of squares; x / rms; its product with a scale."""
    normed = next((v for v in operands if isinstance(v, Normed)), None)
    if normed is not None:
        other = [v for v in operands if v is not normed]
        if name == "mul" and other and isinstance(other[0], Param):
            return rms_norm(walk, normed.last, normed.x, other[0],
                            normed.epsilon)
        whole = mean_square(walk, normed)
        return elementwise(walk, node, *(
            whole if v is normed else v for v in operands), **keywords)
    found = next(v for v in operands if isinstance(v, Statistic))
    x = next((v for v in operands if isinstance(v, Act)), None)
    if x is not None:
        x = walk.tensor(x)
        epsilon = float(1 / found.samples.new_tensor(1) *
                        (found.samples[0] ** -2 - POINTS[0].abs()))
        root = (POINTS.abs() + epsilon) ** -0.5
        if (name == "mul" and x.tensor == found.x.tensor and
                torch.allclose(found.samples, root)):
            return Normed(found.x, round_number(epsilon), node, found)
        return arithmetic(walk, node, name, *(
            mean_square(walk, v) if v is found else v for v in operands))
    given = [v.samples.clone() if isinstance(v, Statistic) else number_of(v)
             for v in operands]
    step = node, tuple(None if v is found else v for v in operands)
    return Statistic(found.x, node.target(*given, **keywords),
                     found.steps + (step,))


def round_number(value):
    """A number that was written with few digits."""
    return float(f"{value:.6g}")


def norm_rule(walk, x, statistics):
    """Rule of a norm over the last dimension."""
    if len(x.dims[-1]) != 1 or x.own[-1] != x.dims[-1][0] or len(x.own) < 2:
        raise Unmappable("expected a norm of the last dimension")
    if [a.letter for a in x.own[:2]] == ["b", "s"] and len(x.own) == 3:
        return "bsh!", "h", "".join(",bs" * statistics)
    letters = Letters()
    letters.of = {x.own[-1]: "h"}
    rows = letters(x.own[:-1])
    return rows + "h!", "h", f",{rows}" * statistics


def rms_norm(walk, node, x, scale, epsilon):
    x = walk.tensor(x)
    if not is_same(sorted_atoms(flatten(x.dims), x.own), x.own):
        raise Unmappable("a norm of a broadcast tensor")
    rows, last, statistics = norm_rule(walk, x, 1)
    weight = walk.vector(scale, [x.own[-1].extent], constant=1)
    y = walk.add("rms_norm", node, [x.tensor, weight],
                 f"{rows},{last}->{rows.replace('!', '')}{statistics}",
                 epsilon=epsilon)[0]
    return dataclasses.replace(x, tensor=y)


def sorted_atoms(atoms, own):
    return sorted(atoms, key=own.index) if set(atoms) <= set(own) else atoms


def rms_norm_whole(walk, node, x, shape, scale=None, epsilon=None):
    if len(shape) != 1:
        raise Unmappable("expected a norm over the last dimension")
    if epsilon is None:
        epsilon = torch.finfo(torch.float32).eps
    return rms_norm(walk, node, x, scale, epsilon)


def layer_norm(walk, node, x, shape, scale=None, shift=None, epsilon=1e-5, *_):
    x = walk.tensor(x)
    if len(x.dims[-1]) > 1 and len(shape) == 1:
        return walk.along(x, node, len(x.dims) - 1, lambda whole: layer_norm(
            walk, node, whole, shape, scale, shift, epsilon))
    if x.own[-1:] != x.dims[-1] or not is_same(
            sorted_atoms(flatten(x.dims), x.own), x.own):
        x = walk.plain(x)
    if len(shape) != 1:
        raise Unmappable("expected a norm over the last dimension")
    rows, last, statistics = norm_rule(walk, x, 2)
    size = [x.own[-1].extent]
    operands = [x.tensor, walk.vector(scale, size, constant=1),
                walk.vector(shift, size)]
    y = walk.add(
        "layer_norm", node, operands,
        f"{rows},{last},{last}->{rows.replace('!', '')}{statistics}",
        epsilon=epsilon)[0]
    return dataclasses.replace(x, tensor=y)


# ---- Dense layers and tables ---------------------------------------------------

def dense(walk, node, x, weight, bias, transposed):
    """y = x w + bias over the last dimension of x; where something slices y,
    a layer for each piece."""
    if not isinstance(weight, Param) or len(weight.shape) != 2:
        raise Unmappable("expected a product with a matrix of parameters")
    x = walk.tensor(x)
    k = x.dims[-1]
    if not k or x.own[-len(k):] != k or not is_same(
            sorted_atoms(flatten(x.dims), x.own), x.own):
        x = walk.plain(x)
        k = x.dims[-1]
    if bias is not None and not isinstance(bias, Param):
        raise Unmappable("expected a bias of parameters")
    if transposed:
        weight = dataclasses.replace(
            weight, shape=weight.shape[::-1],
            views=weight.views[:-1] if weight.views[-1:] == (("t", ()),) else
            weight.views + (("t", ()),))
    out, into = weight.shape
    if not k:  # a single feature
        raise Unmappable("a dense layer of one feature")
    m = x.own[:len(x.own) - len(k)]
    whole = walk.atoms.make(f"{node.name}.out", out, "f")
    walk.of_layers.add(node.name)
    cut = next((a for a in whole if a.name in walk.atoms.cuts), None)
    stddev = walk.stddev(1 / math.sqrt(3 * into))
    made = []
    for i, (start, stop) in enumerate(walk.atoms.pieces(cut) if cut else
                                      [(0, 0)]):
        n, rows, suffix, parts = whole, (), None, {}
        if cut:
            # A piece of one element is no dimension.
            parts = {a: walk.atoms.make(
                f"{a.name}/{start}", stop - start if a is cut else a.extent,
                a.letter) for a in whole if a is not cut or stop - start > 1}
            parts.setdefault(cut, [])
            n = flatten(parts[a] for a in whole)
            rows = tuple(slice(start, stop) if a is cut else slice(None)
                         for a in whole)
            suffix = str(i)
        letters = Letters()
        halves = walk.atoms.in_halves(n)
        own, view = [a for a, _ in halves], [a.extent for a in whole]
        if any(order for _, order in halves):
            if not cut:
                rows = tuple(order or slice(None) for _, order in halves)
                view = [a.extent for a in own]
            else:
                of_whole = walk.atoms.in_halves([
                    dataclasses.replace(a, name=parts[a][0].name) if a != cut
                    and len(parts[a]) == 1 else a for a in whole])
                view = [a.extent for a, _ in of_whole]
                rows = tuple(
                    slice(start, stop) if a == cut else order or slice(None)
                    for a, order in of_whole)
        rule = f"{letters(m)}{letters(k)},{letters(own)}{letters(k)}"
        shape = [a.extent for a in own]
        behind = f"/{i}" if cut else ""
        moved = cut or rows
        operands = [x.tensor, walk.graph.weight(
            weight.label + behind, shape + [a.extent for a in k],
            (dataclasses.replace(weight, views=weight.views + (
                ("reshape", ([*view, into],)),)), rows) if moved else
            (weight, ()), stddev=stddev)]
        if bias is not None:
            reshaped = dataclasses.replace(
                bias, views=bias.views + (("reshape", (view,)),))
            operands.append(walk.graph.weight(
                bias.label + behind, shape, (reshaped if moved else bias, rows)))
            rule += f"+{letters(own)}"
        y = walk.add("linear", node, operands,
                     f"{rule}->{letters(m)}{letters(own)}", suffix=suffix)[0]
        made.append((start, stop, parts, Act(y, m + own, x.dims[:-1] + [n])))
    if not cut:
        return made[0][3]
    return Act(None, m + whole, x.dims[:-1] + [whole], cut=cut,
               pieces=tuple(made))


def linear(walk, node, x, weight, bias=None):
    return dense(walk, node, x, weight, bias, transposed=False)


def addmm(walk, node, bias, x, weight, beta=1, alpha=1):
    if alpha != 1 or beta != 1:
        raise Unmappable("expected alpha and beta of 1")
    return dense(walk, node, x, weight, bias, transposed=True)


def matmul(walk, node, x, y):
    if isinstance(x, Scores) and x.done:
        return attend_or_multiply(walk, node, x, y)
    if isinstance(y, Param) and len(y.shape) == 2 and not isinstance(x, Param):
        return dense(walk, node, x, y, None, transposed=True)
    x, y = (walk.cut_off(v) if isinstance(v, Part) else v for v in (x, y))
    if is_softened(node) and all(
            isinstance(v, Act) and len(v.dims) in (3, 4) for v in (x, y)):
        # Keys are transposed; attend has them as they were.
        keys = y.viewed([*y.dims[:-2], y.dims[-1], y.dims[-2]])
        return Scores(x, keys, last=node)
    return product(walk, node, x, y)


def baddbmm(walk, node, added, x, y, beta=1, alpha=1):
    if beta != 1 or alpha != 1:
        raise Unmappable("expected alpha and beta of 1")
    scores = matmul(walk, node, x, y)
    if isinstance(scores, Scores) and isinstance(added, torch.Tensor):
        return dataclasses.replace(scores, mask=added)
    return arithmetic(walk, node, "add", added, scores)


def is_softened(node):
    """Whether a softmax is behind a product, but for what scales and masks it:
    these may be attention's scores."""
    for _ in range(8):
        users = [u for u in node.users if operator_name(u) not in (
            "size", "sym_size", "_assert_tensor_metadata")]
        if len(users) != 1:
            return False
        node, name = users[0], operator_name(users[0])
        if name in ("softmax", "_softmax"):
            return True
        if name.rstrip("_") not in (
                "mul", "div", "add", "masked_fill", "where", "to", "_to_copy",
                "view", "reshape", "dropout", "type_as", "float"):
            return False
    return False


def product(walk, node, x, y):
    """The matrix product of the last two dimensions."""
    x, y = walk.tensor(x), walk.tensor(y)
    row, column = len(x.dims) == 1, len(y.dims) == 1
    x = x.viewed([[], *x.dims]) if row else x
    y = y.viewed([*y.dims, []]) if column else y
    outer = aligned(walk, node, [v.viewed(v.dims[:-2]) for v in (x, y)])
    z = contraction(walk, node, [x, y], [
        [*(("outer", i) for i in range(len(outer) - len(x.dims) + 2,
                                       len(outer))), "m", "k"],
        [*(("outer", i) for i in range(len(outer) - len(y.dims) + 2,
                                       len(outer))), "k", "n"]],
        [*(("outer", i) for i in range(len(outer))), "m", "n"])
    dims = z.dims[:-1] if column else z.dims
    return z.viewed(dims[:-2] + dims[-1:] if row and not column else
                    dims[:-1] if row else dims)


def contraction(walk, node, tensors, labels, to):
    """A sum of products over dimensions by their labels, some of `to`."""
    dims, used = {}, set()
    for t, names in zip(tensors, labels):
        for d, (name, dim) in enumerate(zip(names, t.dims)):
            known = dims.get(name)
            if known is not None and extent(known) > 1 and extent(dim) > 1:
                fit(walk, known, dim)
            elif known is None or extent(dim) > 1:
                dims[name] = [
                    a if a not in used else
                    Atom(f"{node.name}.{name}.{i}", a.extent, "f")
                    for i, a in enumerate(dim)]
                used |= set(dims[name])
    if walk.atoms.changed:
        return Act(tensors[0].tensor, [], [dims[name] for name in to])
    for name, dim in dims.items():
        if name not in to and len(tensors) == 2 and extent(dim) > 1 and not (
                name in labels[0] and name in labels[1]):
            raise Unmappable("a sum over a dimension of one operand alone")
    made = [dims[name] for name in to]
    own = held(made, [[(t, t.dims[names.index(name)])
                       for t, names in zip(tensors, labels) if name in names]
                      for name in to])
    if walk.batch not in own and any(walk.batch in t.own for t in tensors):
        raise Unmappable("its result is not of each sample, and batches are "
                         "cut into microbatches")
    letters = Letters()
    result = letters(own)
    rules = [rule_of(t, [dims[name] for name in names], letters)
             for t, names in zip(tensors, labels)]
    if len(tensors) == 1:
        op = "transpose" if len(own) == len(tensors[0].own) else "reduce_sum"
    else:
        op = "einsum"
    z = walk.add(op, node, [t.tensor for t in tensors],
                 f"{','.join(rules)}->{result}")[0]
    return Act(z, own, made)


def einsum(walk, node, equation, operands, path=None):
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    labels = left.split(",")
    if not arrow or "." in text or len(labels) != len(operands) or (
            len(operands) not in (1, 2)):
        raise Unmappable("expected an equation of one or two operands with "
                         "'->' and without '...'")
    if any(len(set(part)) < len(part) for part in (*labels, right)):
        raise Unmappable("an equation with a diagonal")
    if len(operands) == 2:
        scores = attention_of(walk, node, labels, right, *operands)
        if scores is not None:
            return scores
    tensors = [walk.tensor(v) for v in operands]
    if any(len(t.dims) != len(part) for t, part in zip(tensors, labels)):
        raise Unmappable("its equation does not fit its operands")
    return contraction(walk, node, tensors, labels, right)


def attention_of(walk, node, labels, right, x, y):
    """An equation as attention's scores, or as their product with values; None
    where it is neither."""
    turned = lambda v, names, order: v.viewed(
        [v.dims[names.index(name)] for name in order])
    if isinstance(x, Scores) and x.done and len(labels[0]) == 4 and (
            isinstance(y, (Act, Part))):
        y = walk.tensor(y)
        b, h, s, t = labels[0]
        rest = set(labels[1]) - {b, h, t}
        if len(rest) == 1 and len(labels[1]) == 4 and (
                set(right) == {b, h, s, *rest}):
            values = turned(y, labels[1], [b, h, t, *rest])
            out = walk.tensor(attend_or_multiply(walk, node, x, values))
            return turned(out, [b, h, s, *rest], right)
    if is_softened(node) and isinstance(x, (Act, Part)) and isinstance(
            y, (Act, Part)) and all(len(part) == 4 for part in (
                *labels, right)):
        b, h, s, t = right
        features = set(labels[0]) - {b, h, s}
        if (len(features) == 1 and set(labels[0]) == {b, h, s, *features} and
                set(labels[1]) == {b, h, t, *features}):
            x, y = (walk.cut_off(v) if isinstance(v, Part) else v
                    for v in (x, y))
            return Scores(turned(x, labels[0], [b, h, s, *features]),
                          turned(y, labels[1], [b, h, t, *features]),
                          last=node)
    return None


def attend_or_multiply(walk, node, scores, values):
    """By the operator, or else written out."""
    if isinstance(values, Act) and len(values.dims) != len(scores.q.dims):
        raise Unmappable("scores and values of different dimensions")
    try:
        return attend(walk, node, scores.q, scores.k, values, scores.scale,
                      scores.mask, scores.bias)
    except Unmappable:
        if walk.atoms.changed or scores.bias is not None:
            raise
        return product(walk, node, written_out(walk, scores), values)


def written_out(walk, scores):
    """Scores, or their softmax, as a tensor."""
    node = scores.last
    if scores.bias is not None or node is None:
        raise Unmappable("scores with biases that attention does not read")
    q, k = walk.tensor(scores.q), walk.tensor(scores.k)
    x = product(walk, node, q,
                k.viewed([*k.dims[:-2], k.dims[-1], k.dims[-2]]))
    if walk.atoms.changed:
        return x
    sizes = [extent(dim) for dim in x.dims[-2:]]
    kind, window = seen_keys(walk, scores.mask, sizes)
    if scores.scale != 1:
        x = scaled(walk, node, x, scores.scale)
    if window or (kind == "causal" and any(len(d) != 1 for d in x.dims[-2:])):
        raise Unmappable("a window over scores that are written out")
    if kind == "causal":
        letters = Letters()
        letters.of = {x.dims[-2][0]: "q", x.dims[-1][0]: "k"}
        rule = letters(x.own)
        # Of every type, and with an exponential of zero beside any score.
        y = walk.add("causal_mask", node, [x.tensor], f"{rule}->{rule}",
                     value=-60000)[0]
        x = dataclasses.replace(x, tensor=y)
    if scores.done:
        x = softmax_of(walk, node, x, len(x.dims) - 1)
    return x


def scaled(walk, node, x, factor):
    letters = Letters()(x.own)
    y = walk.add("scale", node, [x.tensor], f"{letters}->{letters}",
                 factor=factor)[0]
    return dataclasses.replace(x, tensor=y)


def softmax_of(walk, node, x, axis, op="softmax"):
    x = walk.tensor(x)
    if len(x.dims[axis]) != 1:
        return walk.along(x, node, axis % len(x.dims), lambda whole: softmax_of(
            walk, node, whole, axis, op))
    if x.dims[axis][0] not in x.own:
        raise Unmappable("a softmax over a dimension that is broadcast")
    if x.dims[axis][0] == walk.batch:
        raise Unmappable("a softmax over samples, which are cut into "
                         "microbatches")
    letters = Letters()
    letters.of = {x.dims[axis][0]: "z"}
    rule = letters(x.own)
    y = walk.add(op, node, [x.tensor], f"{rule}->{rule}")[0]
    return dataclasses.replace(x, tensor=y)


def embedding(walk, node, table, ids, *_, **__):
    if not isinstance(table, Param) or len(table.shape) != 2:
        raise Unmappable("expected a table of parameters")
    rows, width = table.shape
    h = walk.atoms.make(f"{node.name}.out", width, "f")
    if isinstance(ids, torch.Tensor):
        rows_of_ids = ids.reshape(-1, ids.shape[-1])
        if bool((rows_of_ids == rows_of_ids[0]).all()):
            return constant_rows(walk, node, table, ids, h)
        return Bias(table, rows_of_ids)
    ids = walk.plain(ids)
    if len(ids.own) != 2 or len(h) != 1:
        raise Unmappable("expected ids of one sequence a sample")
    y = walk.lookup(node, table, rows, width, (table, ()), ids.tensor, None)
    return Act(y, ids.own + h, ids.dims + [h])


def constant_rows(walk, node, table, ids, h):
    """Rows that are the same for all samples: by the input of positions."""
    row = ids.reshape(-1, ids.shape[-1])
    if not bool((row == row[0]).all()):
        raise Unmappable("ids that are constants which differ by sample")
    first = int(row[0, 0])
    places = torch.arange(row.shape[1]) + first
    if not bool((row[0] == places).all()):
        raise Unmappable("ids that are constants, and not places 0, 1, …")
    s = walk.sequence_of(row.shape[1])
    # The rows in front of the first place are behind all others.
    views = (("roll", (-first, 0)),) if first else ()
    source = dataclasses.replace(table, views=table.views + views)
    y = walk.lookup(node, table, *table.shape, (source, ()),
                    walk.extra(walk.places[s], [walk.batch, s]), None)
    return Act(y, [walk.batch, s] + h,
               [[] for _ in ids.shape[:-1]] + [[s], h])


def dropout(walk, node, x, probability, training=True):
    if probability == 0 or not training:
        return x
    if isinstance(x, Scores):
        warn_dropout(walk, probability)
        return x
    x = walk.tensor(x)
    letters = letters_of(x.own)
    y = walk.add("dropout", node, [x.tensor], f"{letters}->{letters}",
                 probability=probability, salt=walk.graph.salts)[0]
    walk.graph.salts += 1
    return dataclasses.replace(x, tensor=y)


def warn_dropout(walk, probability):
    if probability:
        walk.warnings[f"dropout of {probability} on attention probabilities is "
                      "not applied"] = True


# ---- Views ---------------------------------------------------------------------

def view_of_param(node, x, arguments, part=""):
    name = operator_name(node)
    arguments = tuple(arguments)
    return Param(x.name, list(node.meta["val"].shape),
                 x.views + ((name, arguments),), x.part + part)


def part_of_param(x, dim, start, stop, dropped=False):
    """A piece of a parameter, which is a weight of its own."""
    dim %= len(x.shape)
    shape = [stop - start if d == dim else size
             for d, size in enumerate(x.shape) if d != dim or not dropped]
    views = (("narrow", (dim, start, stop - start)),)
    if dropped:
        views += (("squeeze", (dim,)),)
    whole = (start, stop) == (0, x.shape[dim])
    return Param(x.name, shape, x.views + views,
                 x.part + ("" if whole else f"/{start}"))


def viewing(handler):
    """A handler of views: of parameters they are kept, of other values made
    at once."""
    def view(walk, node, x, *arguments, **keywords):
        if isinstance(x, Param):
            return view_of_param(node, x, arguments)
        if isinstance(x, Bias):
            return x
        if isinstance(x, Patches):
            return patch_view(walk, node, x, *arguments)
        if isinstance(x, States) and len(x.of) == 1:
            x = x.of[0].viewed([[], *x.of[0].dims])
        if isinstance(x, (Part, Turned, Statistic, Normed)):
            x = walk.tensor(x)
        if isinstance(x, Scores) and len(node.meta["val"].shape) != len(
                x.q.dims):  # (batch, heads) apart or together
            return x
        if isinstance(x, Scores) or (isinstance(x, Chosen) and
                                     x.what == "all"):
            x = walk.tensor(x)
        if isinstance(x, Chosen):
            return x
        if not isinstance(x, Act):
            raise Unmappable(described(x))
        return x.viewed(handler(walk, node, x, *arguments, **keywords))
    return view


def reshaped(walk, node, x, *_):
    shape = list(node.meta["val"].shape)
    atoms, i, dims = flatten(x.dims), 0, []
    own = list(x.own)

    def misfit():
        raise Unmappable(f"cannot make {shape} of {x.shape} without moving "
                         "elements")

    for size in shape:
        dim, rest = [], size
        if size == 1 and i < len(atoms) and atoms[i].extent == 1:
            dim.append(atoms[i])
            i += 1
        while rest > 1:
            if i == len(atoms):
                misfit()
            atom = atoms[i]
            if rest % atom.extent == 0:
                dim.append(atom)
                rest //= atom.extent
                i += 1
                continue
            if atom.extent % rest:
                misfit()
            parts = walk.atoms.split(atom, rest)
            if parts[0].extent != rest:
                misfit()
            atoms[i:i + 1] = parts
            if atom in own:
                at = own.index(atom)
                own[at:at + 1] = parts
        # Heads that are split into (heads, 1) stay one dimension.
        while (dim and i < len(atoms) and atoms[i].extent == 1 and
               atoms[i].letter == dim[-1].letter):
            dim.append(atoms[i])
            i += 1
        dims.append(dim)
    for atom in atoms[i:]:
        if atom.extent != 1 or not dims:
            misfit()
        dims[-1].append(atom)
    x.own[:] = own
    return dims


def transposed(walk, node, x, a, b):
    dims = list(x.dims)
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def permuted(walk, node, x, order):
    return [x.dims[d] for d in order]


def squeezed(walk, node, x, at=None):
    ats = range(len(x.dims)) if at is None else (
        at if isinstance(at, (list, tuple)) else [at])
    ats = {d % len(x.dims) for d in ats}
    return [dim for d, dim in enumerate(x.dims)
            if d not in ats or extent(dim) > 1]


def unsqueezed(walk, node, x, at):
    dims = list(x.dims)
    dims.insert(at % (len(dims) + 1), [])
    return dims


def expanded(walk, node, x, sizes, **_):
    """New dimensions are atoms that the tensor lacks, but for the batch."""
    dims = [[]] * (len(sizes) - len(x.dims)) + x.dims
    result = []
    for d, (dim, size) in enumerate(zip(dims, sizes)):
        if size in (-1, extent(dim)):
            result.append(dim)
        elif d == 0 and size == TRACED_BATCH and walk.batch in x.own:
            result.append([walk.batch])
        else:
            result.append([Atom(f"{node.name}.{d}", size, "r")])
    return result


def repeated(walk, node, x, times, dim=None, **_):
    dims = list(x.dims)
    if not isinstance(times, int) or dim is None:
        raise Unmappable("repeats other than of a whole dimension")
    dims[dim] = dims[dim] + [Atom(f"{node.name}.r", times, "r")]
    return dims


def sliced(walk, node, x, dim=0, start=None, stop=None, step=1):
    if isinstance(x, Param) and step == 1:
        return part_of_param(x, dim, *ends(start, stop, x.shape[dim]))
    if isinstance(x, (Patches, Param, Scores, Chosen, Statistic, Normed)):
        x = walk.tensor(x)
    if step != 1:
        x = walk.tensor(x)
        dim %= len(x.dims)
        start, stop = ends(start, stop, x.shape[dim])
        return sliced_off(walk, node, x, dim, start,
                          -(-(stop - start) // step), step)
    if isinstance(x, Part):
        if dim % len(x.x.dims) != x.dim or x.dropped or x.sign < 0:
            x = walk.cut_off(x)
        else:
            size = x.stop - x.start
            start, stop = ends(start, stop, size)
            return dataclasses.replace(x, start=x.start + start,
                                       stop=x.start + stop)
    if not isinstance(x, Act):
        raise Unmappable(described(x))
    dim %= len(x.dims)
    size = x.shape[dim]
    start, stop = ends(start, stop, size)
    if (start, stop) == (0, size):
        return x
    return part(walk, node, x, dim, start, stop)


def ends(start, stop, size):
    start, stop, _ = slice(start, stop).indices(size)
    return start, stop


def places(walk, part):
    """Some places of a dimension, as a tensor of their own."""
    x = sliced_off(walk, part.node, part.x, part.dim, part.start,
                   part.stop - part.start)
    if part.dropped:
        dims = list(x.dims)
        beside = max(part.dim - 1, 0)
        dims[beside:beside + 2] = [flatten(dims[beside:beside + 2])]
        x = x.viewed(dims)
    if part.sign < 0:
        x = dataclasses.replace(x, samples=-POINTS, last=part.node)
    return x


def part(walk, node, x, dim, start, stop, dropped=False):
    """A slice: a piece, where the tensor is made in pieces."""
    if x.cut is not None and x.dims[dim] == [x.cut]:
        for begin, end, parts, piece in x.pieces:
            if (begin, end) == (start, stop):
                dims = [flatten(parts.get(a, [a]) for a in d) for d in x.dims]
                return piece.viewed(dims[:dim] + dims[dim + dropped:])
    return Part(x, dim, start, stop, dropped, node=node)


def placed(walk, node, x, dim, size, op, suffix=None, **attributes):
    """Dimension `dim` with `size` places that `op` makes of its own."""
    x = walk.joined(walk.tensor(x), node, dim)
    atom = x.dims[dim][0]
    if len(x.dims[dim]) != 1 or atom not in x.own:
        raise Unmappable("places of a dimension that is several or broadcast")
    if atom.letter == "b":
        raise Unmappable("takes some of the samples")
    letters = Letters()
    letters.of = {"m": "m", "d": "d"}
    front, behind = (letters(part) for part in (
        x.own[:x.own.index(atom)], x.own[x.own.index(atom) + 1:]))
    y = walk.add(op, node, [x.tensor], f"{front}m!{behind}->{front}d!{behind}",
                 suffix=suffix, sizes={"d": size}, places=size, **attributes)[0]
    made = Atom(f"{y}.places", size, atom.letter)
    swap = lambda atoms: [made if a == atom else a for a in atoms]
    return walk.apart(Act(y, swap(x.own), [swap(d) for d in x.dims]), node, dim)


def sliced_off(walk, node, x, dim, start, size, step=1):
    return placed(walk, node, x, dim, size, "slice", start=start, step=step)


def resampled(walk, node, x, dim, size, start, step, linear):
    return placed(walk, node, x, dim, size, "resample", start=start, step=step,
                  linear=linear)


def resized(linear):
    """Images and signals of another size (nn.Upsample)."""
    def resize(walk, node, x, sizes=None, *more):
        aligned = more[0] if linear else False
        factors = more[-1] if more else None
        x = image(walk, node, x)
        for i, size in enumerate(node.meta["val"].shape[2:]):
            before = x.shape[i + 2]
            if size == before:
                continue
            # As PyTorch computes it, by the factor where one is given.
            step = 1 / factors[i] if factors else before / size
            start = step / 2 - 0.5 if linear else 1e-9
            if aligned:
                step = (before - 1) / (size - 1) if size > 1 else 1
                start = 0
            x = resampled(walk, node, x, i + 2, size, start, step or 1, linear)
        return x
    return resize


def padded(walk, node, x, pads, mode="constant", value=None):
    """The last dimensions first, each in front and behind."""
    if not isinstance(x, (Act, Part, Patches)):
        raise Unmappable(described(x))
    x = walk.tensor(x)
    for i in range(0, len(pads), 2):
        before, behind = pads[i:i + 2]
        dim = len(x.dims) - 1 - i // 2
        size = x.shape[dim]
        if min(before, behind) < 0:  # what is cut off
            start, stop = max(0, -before), size - max(0, -behind)
            x = sliced_off(walk, node, x, dim, start, stop - start)
            before, behind, size = max(0, before), max(0, behind), stop - start
        if before == behind == 0:
            continue
        whole = size + before + behind
        if mode == "constant":
            x = placed(walk, node, x, dim, whole, "pad", before=before,
                       value=value or 0)
        elif mode == "replicate":
            x = resampled(walk, node, x, dim, whole, -before, 1, False)
        else:
            # Runs of places that are turned round, or are those of the other
            # end.
            turned = mode == "reflect"
            step = -1 if turned else 1
            front = [sliced_off(walk, node, x, dim, before if turned else
                                size - before, before, step)] if before else []
            back = [sliced_off(walk, node, x, dim, size - 2 if turned else 0,
                               behind, step)] if behind else []
            x = joined(walk, node, [*front, x, *back], dim)
    return x


def padded_by(mode):
    return lambda walk, node, x, pads: padded(walk, node, x, pads, mode)


def split(walk, node, x, sizes, dim=0):
    if isinstance(x, Param):
        dim %= len(x.shape)
        if isinstance(sizes, int):
            sizes = [min(sizes, x.shape[dim] - i)
                     for i in range(0, x.shape[dim], sizes)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [part_of_param(x, dim, i, i + n) for i, n in zip(starts, sizes)]
    if isinstance(x, (Part, Patches, Statistic, Normed)):
        x = walk.tensor(x)
    if not isinstance(x, Act):
        raise Unmappable(described(x))
    dim %= len(x.dims)
    size = x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, size - i) for i in range(0, size, sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [part(walk, node, x, dim, i, i + n) for i, n in zip(starts, sizes)]


def chunk(walk, node, x, chunks, dim=0):
    if isinstance(x, Part):
        x = walk.cut_off(x)
    return split(walk, node, x, -(-x.shape[dim] // chunks), dim)


def unbind(walk, node, x, dim=0):
    return [select(walk, node, x, dim, i) for i in range(x.shape[dim])]


def select(walk, node, x, dim, place):
    if isinstance(x, States) and dim % 3 == 0:
        return x.of[place]
    if isinstance(x, Param):
        place %= x.shape[dim]
        return part_of_param(x, dim, place, place + 1, dropped=True)
    if isinstance(x, (Part, Patches, Statistic, Normed)):
        x = walk.tensor(x)
    if not isinstance(x, Act):
        raise Unmappable(described(x))
    dim %= len(x.dims)
    place %= x.shape[dim]
    if [a.letter for a in x.dims[dim]] != ["s"] or len(x.own) != 3:
        return part(walk, node, x, dim, place, place + 1, dropped=True)
    x = walk.plain(x)
    if len(x.own) != 3 or dim != 1:
        raise Unmappable("expected one place of a sequence of features")
    y = walk.add("select", node, [x.tensor], "bsh->bo!h", sizes={"o": 1},
                 count=1, place=place)[0]
    one = Atom(f"{node.name}.place", 1, "s")
    return Act(y, [x.own[0], one, x.own[2]], [x.dims[0], x.dims[2]])


def cat(walk, node, parts, dim=0):
    rank = len(node.meta["val"].shape)
    dim %= rank
    parts = [p for p in parts
             if not isinstance(p, Part) or p.start < p.stop]
    if len(parts) == 1:
        return parts[0]
    kinds = [type(p) for p in parts]
    if kinds == [Part, Part] and dim == rank - 1:
        a, b = parts
        if (a.x.tensor == b.x.tensor and a.sign == -1 and b.sign == 1 and
                a.start == b.stop and a.stop - a.start == b.stop - b.start):
            return Turned(a.x, b.start, a.stop, swapped=True)
    if kinds == [Turned, Part] and dim == rank - 1:
        a, b = parts
        if a.x.tensor == b.x.tensor and a.stop == b.start:
            return rotary(walk, node, a, b.stop)
    if len(parts) == 2 and isinstance(parts[1], Patches) and dim == 1:
        return join_patches(walk, node, *parts)
    return joined(walk, node, [walk.tensor(p) for p in parts], dim)


# ---- Attention -----------------------------------------------------------------

def scaled_dot_product(walk, node, q, k, v, mask=None, probability=0,
                       causal=False, scale=None, enable_gqa=False):
    warn_dropout(walk, probability)
    if scale is None:
        scale = 1 / math.sqrt(node.args[0].meta["val"].shape[-1])
    bias = None
    if isinstance(mask, Bias):
        mask, bias = mask.mask, mask
    return attend_or_multiply(walk, node, Scores(
        q, k, scale, "causal" if causal else mask, bias, True, node), v)


def attend(walk, node, q, k, v, scale, mask, bias):
    """Attention of queries [b, heads, s, d] to keys [b, groups, t, d]."""
    for x in (q, k):
        if isinstance(x, Act) and x.samples is not None:
            op, factor = function_of(x.samples)
            scale *= factor.get("factor", 1)
    q, k = (dataclasses.replace(x, samples=None) if isinstance(x, Act) and
            x.samples is not None and function_of(x.samples)[0] == "scale"
            else x for x in (q, k))
    q, k, v = (walk.tensor(x, what) for x, what in
               ((q, "queries"), (k, "keys"), (v, "values")))
    joint, alone = len(q.dims) == 3, False
    if joint:  # (batch and heads), or no heads
        q, k, v = (x.viewed([x.dims[0][:1], x.dims[0][1:], *x.dims[1:]])
                   for x in (q, k, v))
        alone = not q.dims[1]
        if alone:  # a single head is among the features
            q, k, v = (x.viewed([x.dims[0], x.dims[3][:-1], x.dims[2],
                                 x.dims[3][-1:]])
                       if extent(x.dims[3][:-1]) == 1 else x
                       for x in (q, k, v))
    if any(len(x.dims) != 4 or [len(dim) for dim in x.dims[2:]] != [1, 1] or
           x.dims[0] != [walk.batch] for x in (q, k, v)):
        raise Unmappable("expected queries, keys and values of heads")
    sequences = (q.dims[2][0], k.dims[2][0])
    if any(atom not in walk.places for atom in sequences):
        raise Unmappable("attention along something else than a sequence")
    split_heads(walk, q, k, v)
    if walk.atoms.changed:
        b, heads, s, _ = q.dims
        return q.viewed(([b + heads, s] if joint else [b, heads, s]) +
                        [v.dims[3]])
    if len({x.tensor in walk.graph.in_pairs for x in (q, k)}) > 1 or (
            v.tensor in walk.graph.in_pairs):
        raise Unmappable("queries and keys of which neighbours are turned in one "
                         "alone")
    b, heads, s, _ = q.dims
    orders = [(q, heads)] + [
        (x, [a for a in x.dims[1] if a in x.own]) for x in (k, v)]
    for x, of_heads in orders:
        order = [*x.dims[0], *x.dims[2], *of_heads, *x.dims[3]]
        if x.own != order and set(x.own) == set(order):
            of_op = [x.dims[0], x.dims[2], of_heads, x.dims[3]]
            x.own, x.tensor = order, walk.plain(x.viewed(of_op)).tensor
        if x.own != order or len(of_heads) != len(x.own) - 3:
            raise Unmappable("queries, keys or values are broadcast")
    positions = [walk.extra(walk.places[atom], [walk.batch, atom])
                 for atom in sequences]
    operands = [q.tensor, k.tensor, v.tensor, *positions]
    kind, window = seen_keys(walk, mask, [a.extent for a in sequences])
    rule = "bsgrd!,bt!gd,btge!,bs,bt->bsgre,bsgr"
    attributes = {"scale": round_number(scale)
                  if abs(round_number(scale) - scale) < 1e-12 else scale}
    if bias is not None:
        if window:
            raise Unmappable("a window together with biases by distance")
        op, rule = "attention_relative", rule.replace("->", ",n!gr->")
        operands.append(bias_table(walk, bias, heads, kind))
        attributes |= {"causal": kind == "causal",
                       "max_distance": max_distance_of(walk, bias, kind)}
    elif kind == "causal":
        op = "attention"
        attributes |= {"window": window}
    else:
        op = "attention_bidirectional"
        attributes |= {"window": window, "causal": 0}
    y = walk.add(op, node, operands, rule, suffix="attention", **attributes)[0]
    if alone:  # as if there were none
        y = walk.add("reduce_sum", node, [y], "bsgre->bse",
                     suffix="squeeze")[0]
        return Act(y, [*b, *s, *v.dims[3]], [b, s, v.dims[3]])
    dims = [b + heads, s] if joint else [b, heads, s]
    return Act(y, [*b, *s, *heads, *v.dims[3]], dims + [v.dims[3]])


def split_heads(walk, q, k, v):
    """Heads are (groups, heads of a group), also where these are one."""
    for x in (k, v):
        if not [a for a in x.dims[1] if a in x.own]:
            walk.atoms.split(x.dims[3][0], 1)
    groups = extent([a for a in k.dims[1] if a in k.own])
    if not q.dims[1]:
        walk.atoms.split(q.dims[3][0], 1)
    elif len(q.dims[1]) == 1:
        if q.dims[1][0].extent % groups:
            raise Unmappable(f"{q.dims[1][0].extent} heads of queries, "
                             f"{groups} of keys")
        walk.atoms.split(q.dims[1][0], groups)
    elif len(q.dims[1]) != 2 or q.dims[1][0].extent != groups:
        raise Unmappable("heads of queries that are not those of keys")


def seen_keys(walk, mask, sizes):
    """("all" or "causal", the window) of a mask."""
    if mask is None or mask is False:
        return "all", 0
    if isinstance(mask, str):
        return mask, 0
    if not isinstance(mask, torch.Tensor):
        raise Unmappable("a mask that depends on the data")
    if id(mask) not in walk.masks:
        walk.masks[id(mask)] = mask, classify(mask, sizes)
    return walk.masks[id(mask)][1]


def classify(mask, sizes):
    seen = mask if mask.dtype == torch.bool else mask > HIDDEN
    if mask.dtype != torch.bool and bool((mask[seen] != 0).any()):
        raise Unmappable("a mask with numbers that are added to scores")
    seen = seen.expand(*seen.shape[:-2], *sizes).reshape(-1, *sizes)
    if any(not torch.equal(seen[0], other) for other in seen[1:]):
        raise Unmappable("a mask that differs by sample or head")
    seen = seen[0]
    if bool(seen.all()):
        return "all", 0
    if sizes[0] == sizes[1]:
        places = torch.arange(sizes[0])
        distance = places[:, None] - places
        causal = not bool(seen[0, -1])
        window = int(seen[-1].sum())
        expected = (distance >= 0 if causal else distance > -window) & (
            distance < window)
        if torch.equal(seen, expected):
            return ("causal" if causal else "all",
                    0 if window == sizes[0] else window)
    raise Unmappable("a mask that is neither causal nor a window")


def scores_elementwise(walk, node, name, *operands, **keywords):
    scores = next(v for v in operands if isinstance(v, Scores))
    other = next((v for v in operands if v is not scores), None)
    number = number_of(other) if is_constant(other) else None
    if name in ("mul", "div") and number is not None and not scores.done:
        scale = scores.scale * number if name == "mul" else (
            scores.scale / number)
        return dataclasses.replace(scores, scale=scale)
    if name == "add" and isinstance(other, Bias) and scores.bias is None:
        return dataclasses.replace(scores, bias=other, mask=other.mask)
    if name == "add" and isinstance(other, torch.Tensor) and (
            scores.mask is None):
        return dataclasses.replace(scores, mask=other)
    if name in ("masked_fill", "where") and scores.mask is None and (
            not scores.done):
        seen = operands[1 if name == "masked_fill" else 0]
        if name == "masked_fill":
            seen, value = ~seen if is_mask(seen) else None, operands[2]
        elif operands[1] is scores:
            value = operands[2]
        else:
            seen, value = ~seen if is_mask(seen) else None, operands[1]
        hidden = number_of(value) if is_constant(value) else None
        if is_mask(seen) and isinstance(hidden, (int, float)) and (
                hidden <= HIDDEN):
            return dataclasses.replace(scores, mask=seen)
    return elementwise(walk, node, *(
        walk.tensor(v) if isinstance(v, Scores) else v for v in operands),
        **keywords)


def is_mask(value):
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def bias_elementwise(walk, node, name, *operands, **keywords):
    bias = next(v for v in operands if isinstance(v, Bias))
    mask = next((v for v in operands if isinstance(v, torch.Tensor)), None)
    if name in ("add", "where") and mask is not None and bias.mask is None:
        return dataclasses.replace(bias, mask=mask)
    raise Unmappable("a bias of attention in a form that is not known")


def bias_table(walk, bias, heads, kind):
    rows, count = bias.table.shape
    if extent(heads) != count:
        raise Unmappable(f"biases of {count} heads, of {extent(heads)}")
    return walk.graph.weight(
        bias.table.name, [rows] + [a.extent for a in heads], (bias.table, ()),
        stddev=walk.stddev(0.02))


def max_distance_of(walk, bias, kind):
    """By which T5's formula gives the buckets (Raffel et al. 2020)."""
    buckets = bias.table.shape[0]
    known = [getattr(m, "relative_attention_max_distance", None)
             for m in walk.traced.module.modules()]
    queries, keys = (torch.arange(n) for n in bias.buckets.shape)
    distance = keys - queries[:, None]
    side = buckets if kind == "causal" else buckets // 2
    offset = (distance > 0) * side if kind != "causal" else 0 * distance
    apart = (-distance).clamp(min=0) if kind == "causal" else distance.abs()
    exact = side // 2
    for most in sorted({m for m in known if m} | {128}):
        far = exact + (torch.log(apart.clamp(min=1).float() / exact) /
                       math.log(most / exact) * (side - exact)).long()
        near = torch.where(apart < exact, apart, far.clamp(max=side - 1))
        if torch.equal(offset + near, bias.buckets):
            return most
    raise Unmappable("buckets of distances that are not T5's")


# ---- Rotary embeddings ---------------------------------------------------------

def rotary_sum(walk, node, name, *operands):
    turned = [v for v in operands if isinstance(v, Turned)]
    if len(turned) == 1 and name == "mul" and turned[0].cos is None:
        constant = next(v for v in operands if v is not turned[0])
        if isinstance(constant, torch.Tensor):
            return dataclasses.replace(turned[0], sin=constant)
    if len(turned) == 2 and name == "add":
        a, b = sorted(turned, key=lambda t: t.swapped)
        same = (a.x.tensor, a.start, a.stop) == (b.x.tensor, b.start, b.stop)
        if same and a.cos is not None and b.sin is not None:
            both = dataclasses.replace(a, sin=b.sin, last=node)
            if (a.start, a.stop) == (0, a.x.shape[-1]):
                return rotary(walk, node, both, a.stop)
            return both
    raise Unmappable("a rotary embedding in a form that is not known")


def rotary(walk, node, turned, stop):
    """Of the features from where `turned` starts to `stop`, the first ones of
    which are turned."""
    x, turns = turned.x, turned.stop - turned.start
    if (turned.start, stop) != (0, x.shape[-1]):
        x = walk.cut_off(Part(x, len(x.dims) - 1, turned.start, stop))
    x = walk.tensor(x)
    if len(x.dims[-1]) != 1 or x.own[-1:] != x.dims[-1] or turned.sin is None:
        raise Unmappable("a rotary embedding of a part of the features")
    s = next((a for a in x.own if a.letter == "s"), None)
    if s not in walk.places or x.own[:2] != [walk.batch, s]:
        raise Unmappable("a rotary embedding of something else than tokens")
    op, attributes = rotary_form(walk, turned.cos, turned.sin)
    letters = Letters()
    rows, last = letters(x.own[:-1]), letters(x.own[-1:])
    y = walk.add(
        op, node, [x.tensor, walk.extra(walk.places[s], x.own[:2])],
        f"{rows}{last}!,{rows[:2]}->{rows}{last}", suffix="rotary",
        fraction=turns / x.shape[-1], **attributes)[0]
    return dataclasses.replace(x, tensor=y)


def rotary_form(walk, cos, sin):
    """The operator whose angles these are, and its attributes: those of the
    model's config, if they give the angles."""
    key = (id(cos), id(sin))
    if key not in walk.masks:
        walk.masks[key] = (cos, sin), find_rotary(walk, cos, sin)
    return walk.masks[key][1]


def find_rotary(walk, cos, sin):
    shapes = {tuple(size for size in t.shape if size > 1) for t in (cos, sin)}
    if len(shapes) == 1 and len(next(iter(shapes))) == 2:
        cos, sin = (t.double().squeeze() for t in (cos, sin))
    else:
        cos, sin = (t.double().reshape(-1, *t.shape[-2:])[0]
                    for t in (cos, sin))
    n = cos.shape[-1]
    places = torch.arange(cos.shape[0], dtype=torch.float64)
    magnitude = float(torch.sqrt(cos[0, 0] ** 2 + sin[0, 0] ** 2))
    for op, attributes in rotary_candidates(walk, cos, sin, n, magnitude):
        angles = places[:, None] * rotary_angles(op, attributes, n)
        angles = torch.cat([angles, angles], -1)
        # In fp32 an angle is off by 2^-24 of itself.
        if (torch.allclose(magnitude * angles.cos(), cos, atol=2e-3) and
                torch.allclose(magnitude * angles.sin(), sin, atol=2e-3)):
            return op, attributes
    raise Unmappable("a rotary embedding by angles that are not known")


def rotary_candidates(walk, cos, sin, n, magnitude):
    found = getattr(walk.config, "rope_parameters", None) or {}
    all_of = [found] + [v for v in found.values() if isinstance(v, dict)]
    for rope in all_of:
        theta = rope.get("rope_theta")
        if theta is None:
            continue
        kind, factor = rope.get("rope_type", "default"), rope.get("factor", 1)
        original = rope.get("original_max_position_embeddings")
        if kind == "default":
            yield "rotary", {"theta": theta}
        if kind == "linear":
            yield "rotary_linear", {"theta": theta, "factor": factor}
        if kind == "llama3":
            yield "rotary_llama3", {
                "theta": theta, "factor": factor,
                "high_frequency": rope["high_freq_factor"],
                "low_frequency": rope["low_freq_factor"],
                "original_positions": original}
        if kind == "yarn":
            yield "rotary_yarn", {
                "theta": theta, "factor": factor, "magnitude": magnitude,
                "beta_fast": rope.get("beta_fast") or 32,
                "beta_slow": rope.get("beta_slow") or 1,
                "original_positions": original}
    if len(cos) > 1:  # theta by the slowest pair
        angles = torch.atan2(sin[1], cos[1])[:n // 2]
        theta = (angles[-1] / angles[0]).item() ** (-n / max(n - 2, 1))
        factor = 1 / angles[0].item()
        theta = float(f"{theta:.4g}")
        if abs(factor - 1) < 1e-5:
            yield "rotary", {"theta": theta}
        else:
            yield "rotary_linear", {"theta": theta,
                                    "factor": round_number(factor)}


def rotary_angles(op, at, n):
    """Of one place: runtime/kernels/rotary_angles.cc."""
    pair = torch.arange(n // 2, dtype=torch.float64)
    angles = at["theta"] ** (-2 * pair / n)
    factor = at.get("factor", 1)
    if op == "rotary":
        return angles
    if op == "rotary_linear":
        return angles / factor
    original = at["original_positions"]
    if op == "rotary_llama3":
        turns = original * angles / (2 * math.pi)
        low, high = at["low_frequency"], at["high_frequency"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        def pair_of(turns):
            return n * math.log(original / (turns * 2 * math.pi)) / (
                2 * math.log(at["theta"]))
        low = max(math.floor(pair_of(at["beta_fast"])), 0)
        high = min(math.ceil(pair_of(at["beta_slow"])), n - 1)
        kept = 1 - ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return angles * (kept + (1 - kept) / factor)


def neighbours_elementwise(walk, node, name, *operands, **keywords):
    tables = [v for v in operands if isinstance(v, torch.Tensor)]
    pairs = [v for v in operands if isinstance(v, Neighbours)]
    if len(pairs) == 1 and name == "mul" and len(tables) == 1 and (
            tables[0].is_complex() and not pairs[0].terms):
        return dataclasses.replace(pairs[0], of_complex=tables[0])
    if len(pairs) == 2 and name in ("add", "sub") and (
            pairs[0].x.tensor == pairs[1].x.tensor):
        sign = 1 if name == "add" else -1
        return Neighbours(pairs[0].x, pairs[0].terms + tuple(
            (which, sign * own, table)
            for which, own, table in pairs[1].terms))
    raise Unmappable("a rotary embedding in a form that is not known")


def as_complex(walk, node, x):
    return Neighbours(walk.tensor(x))


def as_real(walk, node, x):
    if not isinstance(x, Neighbours) or x.of_complex is None:
        raise Unmappable("complex numbers that are no rotary embedding")
    return turned_pairs(walk, node, x.x, x.of_complex.real, x.of_complex.imag)


def stack(walk, node, parts, dim=0):
    if not all(isinstance(p, Neighbours) for p in parts) or len(parts) != 2:
        raise Unmappable("joins tensors along a dimension that they lack")
    # (x cos - y sin, x sin + y cos), (x, y) being neighbours.
    first, second = ({(which, sign): table for which, sign, table in p.terms}
                     for p in parts)
    if set(first) != {(0, 1), (1, -1)} or set(second) != {(0, 1), (1, 1)} or (
            not torch.equal(first[0, 1], second[1, 1]) or
            not torch.equal(first[1, -1], second[0, 1])):
        raise Unmappable("a rotary embedding in a form that is not known")
    return turned_pairs(walk, node, parts[0].x, first[0, 1], first[1, -1])


def turned_pairs(walk, node, x, cos, sin):
    """A rotary embedding that turns neighbours. The operator turns the halves of
    features by each other: the dense layer in front makes them in that order,
    which its result alone may have that attention reads."""
    pairs, two = x.dims[-2:] if len(x.dims) > 1 else ([], [])
    name = pairs[0].name[:-2] if pairs else ""
    if len(pairs) != 1 or len(two) != 1 or two[0].name != name + ".1" or (
            ".out" not in name):
        raise Unmappable("a rotary embedding of neighbours that no dense layer "
                         "makes")
    walk.atoms.pair(name)
    d = Atom(name + "~", 2 * pairs[0].extent, two[0].letter)
    dims = x.dims[:-2] + [[d]]
    if walk.atoms.changed:
        return Act(x.tensor, x.own, dims + [[]])
    if d not in x.own:
        raise Unmappable("a rotary embedding of neighbours that other nodes "
                         "read, too")
    tables = [torch.cat([t, t], -1) for t in (cos, sin)]
    walk.masks[name] = tables  # alive, since told by their ids
    y = rotary(walk, node, Turned(x.viewed(dims), 0, d.extent, *tables),
               d.extent)
    walk.graph.in_pairs.add(y.tensor)
    return y.viewed(dims + [[]])


# ---- Experts -------------------------------------------------------------------

@torch.library.custom_op("tessera::experts", mutates_args=())
def experts_op(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor,
               gate_up: torch.Tensor, down: torch.Tensor,
               activation: str) -> torch.Tensor:
    raise NotImplementedError("stands for experts while a model is traced")


@experts_op.register_fake
def _(x, index, weights, gate_up, down, activation):
    return torch.empty_like(x)


def replace_experts(module):
    """Modules of experts with joint weights, whose own code loops over those
    that are hit, as one operator."""
    for part in module.modules():
        gate_up, down = (getattr(part, name, None)
                         for name in ("gate_up_proj", "down_proj"))
        if not (isinstance(gate_up, nn.Parameter) and gate_up.dim() == 3 and
                isinstance(down, nn.Parameter) and hasattr(part, "act_fn")):
            continue
        if getattr(part, "is_transposed", False) or getattr(
                part, "has_bias", False):
            continue
        activation, _ = function_of(part.act_fn(POINTS))
        part.forward = (
            lambda x, index, weights, part=part, activation=activation:
            experts_op(x, index, weights, part.gate_up_proj, part.down_proj,
                       activation))


def softmax(walk, node, x, dim, dtype=None):
    rank = len(node.meta["val"].shape)
    if isinstance(x, Scores) and dim % rank == rank - 1:
        return dataclasses.replace(x, done=True)
    if dim % rank != rank - 1:
        return softmax_of(walk, node, x, dim % rank)
    return Chosen(walk.plain(x), last=node)


def topk(walk, node, x, k, dim=-1, largest=True, is_sorted=True):
    if isinstance(x, (Act, Part)):
        return chosen_places(walk, node, x, k, dim, largest)
    if not isinstance(x, Chosen) or x.what != "all" or not largest:
        raise Unmappable("the largest elements of something else than a "
                         "router's softmax, or of a tensor")
    return [dataclasses.replace(x, what=what, top_k=k)
            for what in ("weights", "index")]


def chosen_places(walk, node, x, k, dim, largest):
    """The largest elements along a dimension, and their places."""
    # Without a router's one feature, which those do not have that are read by
    # its choices.
    x = walk.tensor(x)
    dim %= len(x.dims)
    x = walk.exact(x.viewed([
        d if i in (0, dim) or extent(d) > 1 else []
        for i, d in enumerate(x.dims)]), node)
    if len(x.dims[dim]) != 1 or x.dims[dim][0].letter == "b":
        raise Unmappable("the largest of a dimension that is several, or of "
                         "samples")
    [v] = x.dims[dim]
    letters = Letters()
    letters.of = {"v": "v", "k": "k"}
    at = x.own.index(v)
    front, behind = letters(x.own[:at]), letters(x.own[at + 1:])
    made = f"{front}k!{behind}"
    results = walk.add("top_k", node, [x.tensor],
                       f"{front}v!{behind}->{made},{made}", integers=(1,),
                       sizes={"k": k}, k=k, largest=largest, last=0)
    [places] = walk.atoms.make(f"{results[0]}.k", k, v.letter)
    own = [places if a == v else a for a in x.own]
    dims = [[places] if d == [v] else d for d in x.dims]
    return [Act(result, own, dims) for result in results]


def by_places(walk, node, op, x, dim, ids):
    """The dimensions of ids, of which those that a tensor lacks are repeated
    for it, and those of x, whose others have the same extents."""
    x, ids = walk.exact(x, node), walk.tensor(ids)
    dim %= len(x.dims)
    if (not isinstance(ids, Act) or len(x.dims[dim]) != 1 or
            any(extent(d) != extent(e) for i, (d, e) in
                enumerate(zip(x.dims, ids.dims)) if i != dim)):
        raise Unmappable(f"{op} of ids that are not those of all others")
    own = [a for a in ids.own if a.extent > 1 or a in x.own]
    if own != ids.own:
        raise Unmappable(f"{op} by ids of a dimension of 1")
    return x, ids, dim


def gather(walk, node, x, dim, ids, **_):
    x, ids, dim = by_places(walk, node, "gather", x, dim, ids)
    [v] = x.dims[dim]
    read = [a for a in ids.own if a not in x.own]
    at = x.own.index(v)
    own = x.own[:at] + read + x.own[at + 1:]
    letters = Letters()
    letters.of = {v: "v"}
    y = walk.add("gather", node, [x.tensor, ids.tensor],
                 f"{letters(x.own)},{letters(ids.own)}->{letters(own)}")[0]
    return Act(y, own, [read if i == dim else d for i, d in enumerate(x.dims)])


def scatter_add(walk, node, x, dim, ids, source):
    """x, with what `source` has added at the places."""
    x = walk.exact(x, node)
    source, ids, dim = by_places(walk, node, "scatter_add", source, dim, ids)
    [k] = source.dims[dim]
    [v] = x.dims[dim]
    own = [v if a == k else a for a in source.own]
    letters = Letters()
    letters.of = {v: "v"}
    y = walk.add("scatter_add", node, [source.tensor, ids.tensor],
                 f"{letters(source.own)},{letters(ids.own)}->{letters(own)}",
                 sizes={"v": v.extent}, places=v.extent, suffix="put")[0]
    return binary(walk, node, "add", [x, Act(y, own, [
        [v] if i == dim else d for i, d in enumerate(source.dims)])])


def total(walk, node, x, dims=None, keep=False, dtype=None):
    if isinstance(x, Chosen) and x.what == "weights" and keep:
        return dataclasses.replace(x, what="sum")
    return reduction("reduce_sum")(walk, node, x, dims, keep)


def chosen_elementwise(walk, node, name, *operands, **keywords):
    chosen = [v for v in operands if isinstance(v, Chosen)]
    if name == "div" and [v.what for v in chosen] == ["weights", "sum"]:
        return dataclasses.replace(chosen[0], renormalised=True)
    number = number_of(operands[-1]) if len(chosen) == 1 else None
    if name == "add" and chosen[0].what == "sum" and (number or 1) < 1e-6:
        return chosen[0]
    if all(v.what == "all" for v in chosen):
        return elementwise(walk, node, *(
            walk.tensor(v) if isinstance(v, Chosen) else v for v in operands),
            **keywords)
    raise Unmappable("weights of experts in a form that is not known")


def experts(walk, node, x, index, weights, gate_up, down, activation):
    x = walk.plain(x)
    if not isinstance(weights, Chosen) or weights.what != "weights" or (
            len(x.own) != 3):
        raise Unmappable("experts whose router is not known")
    logits, graph = weights.logits, walk.graph
    graph.nodes[logits.tensor]["op"] = "linear_fp32"
    if walk.args.dtype in ("fp16", "bf16"):
        graph.tensors[logits.tensor]["dtype"] = "fp32"
    count, both, _ = gate_up.shape
    inner, hidden, top_k = both // 2, x.own[-1].extent, weights.top_k
    tokens = x.own[1].extent
    factor = walk.args.expert_capacity_factor
    capacity = tokens if factor == 0 else min(tokens, max(1, math.ceil(
        factor * top_k * tokens / count)))

    def add(op, operands, rule, suffix, **more):
        return walk.add(op, node, operands, rule, suffix=suffix, **more)

    gates, slots = add(
        "moe_gate", [logits.tensor], "bs!e!->bsk,bsk", "routes", integers=(1,),
        sizes={"k": top_k}, capacity=capacity, group_best=1, groups=1,
        renormalise=weights.renormalised, scale=1, sigmoid=0, top_groups=1,
        top_k=top_k)
    rows = add("moe_dispatch", [x.tensor, slots], "bth,btk->ebsh", "dispatch",
               sizes={"e": count, "s": capacity}, capacity=capacity,
               experts=count)[0]

    def layer(param, operand, shape, part, suffix):
        weight = graph.weight(
            param.name + ("" if part is None else f"/{part}"), shape,
            (param, () if part is None else (slice(None), slice(
                part * inner, (part + 1) * inner))), stddev=walk.stddev(0.02))
        return add("expert_linear", [operand, weight], "ebsi,eoi->ebso",
                   suffix, top_k=top_k)[0]

    gate = layer(gate_up, rows, [count, inner, hidden], 0, "gate")
    gate = add(activation, [gate], "ebsf->ebsf", "act_fn")[0]
    up = layer(gate_up, rows, [count, inner, hidden], 1, "up")
    product = add("multiply", [gate, up], "ebsf,ebsf->ebsf", "product")[0]
    out = layer(down, product, [count, hidden, inner], None, "down")
    out = add("moe_collect", [out, slots], "ebth,bsk->bskh", "collect")[0]
    out = add("moe_combine", [out, gates], "bskh,bsk->bsh", "combine")[0]
    return dataclasses.replace(x, tensor=out)


# ---- Recurrent layers ----------------------------------------------------------

MOST_STEPS = 256  # of an unrolled layer (planner/ops/steps.cc)


def without_ones(walk, node, x):
    """Without dimensions of one element of its tensor beside those of x."""
    dims = [wide(dim) or dim[:1] for dim in x.dims]
    own = [a for a in x.own if a in flatten(dims)]
    if own == x.own:
        return x
    letters = Letters()
    y = walk.add("reduce_sum", node, [x.tensor],
                 f"{letters(x.own)}->{letters(own)}", suffix="squeeze")[0]
    return Act(y, own, dims)


def recurrent(cell):
    """nn.LSTM, nn.GRU or nn.RNN, unrolled: step after step, layer after layer.
    PyTorch's two biases stay two."""
    def unrolled(walk, node, x, first, params, has_biases, layers, dropout,
                 training, both_ways, batch_first):
        x = without_ones(walk, node, walk.tensor(x))
        order = [0, 1, 2] if batch_first else [1, 0, 2]
        x = walk.plain(x.viewed([x.dims[d] for d in order]))
        if [len(dim) for dim in x.dims] != [1, 1, 1] or len(x.own) != 3 or (
                x.own[0] != walk.batch):
            raise Unmappable(f"expected a sequence of features, found {x.shape}")
        count, directions = x.own[1].extent, 2 if both_ways else 1
        if count > MOST_STEPS:
            raise Unmappable(f"{count} steps: at most {MOST_STEPS}")
        each = 4 if has_biases else 2
        if len(params) != layers * directions * each:
            raise Unmappable("a layer whose states are projected")
        given = first if isinstance(first, list) and cell == "lstm" else [first]
        states = [first_states(states, layers * directions) for states in given]
        steps = walk.add(
            "unstack", node, [x.tensor],
            "bd!h->" + ",".join(["bh"] * count), suffix="steps", steps=count,
            alike=True)
        s, last = x.own[1], [[] for _ in states]
        keeps = any(user.args[1] == 2 and user.users for user in node.users)
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                k = layer * directions + direction
                run = Cell(walk, node, cell, params[k * each:(k + 1) * each], k)
                backward = direction == 1
                made, state = run(steps[::-1] if backward else steps,
                                  [of[k] for of in states], keeps)
                outputs.append(made[::-1] if backward else made)
                for of, value in zip(last, state if keeps else state[:1]):
                    of.append(Act(value, [walk.batch, run.h],
                                  [[walk.batch], [run.h]]))
            steps = outputs[0]
            if both_ways:
                steps = [walk.add(
                    "concat_channels", node, pair_, "bm!,bn!->bd!",
                    suffix=f"{layer}.both", channels=2 * run.h.extent,
                    sizes={"d": 2 * run.h.extent})[0]
                    for pair_ in zip(*outputs)]
            if dropout and training and layer + 1 < layers:
                for i, step in enumerate(steps):
                    steps[i] = walk.add(
                        "dropout", node, [step], "bh->bh",
                        suffix=f"{layer}.dropout.{i}", probability=dropout,
                        salt=walk.graph.salts)[0]
                    walk.graph.salts += 1
        y = walk.add("stack", node, steps, ",".join(["bh"] * count) + "->bd!h",
                     suffix="outputs", sizes={"d": count}, steps=count)[0]
        h = walk.atoms.make(f"{node.name}.outputs",
                            directions * run.h.extent, "f")
        if len(h) != 1:
            raise Unmappable("its features are taken apart behind it")
        y = Act(y, [walk.batch, s, *h], [[walk.batch], [s], h])
        return [y.viewed([y.dims[d] for d in order]), *map(States, last)]
    return unrolled


def first_states(value, count):
    """Tensors of a layer and direction each; None where they are zero."""
    if isinstance(value, States):
        if len(value.of) != count:
            raise Unmappable(f"{len(value.of)} first states, of {count}")
        return [x.tensor for x in value.of]
    if isinstance(value, torch.Tensor) and number_of(value) == 0:
        return [None] * count
    raise Unmappable("first states that are neither zeros nor another layer's")


class Cell:
    """One direction of a layer."""

    def __init__(self, walk, node, cell, params, k):
        self.walk, self.node, self.cell, self.k = walk, node, cell, k
        gates = {"lstm": 4, "gru": 3}.get(cell)
        hidden = params[1].shape[1]
        self.h = Atom(f"{node.name}.{k}.hidden", hidden, "h")
        stddev = walk.stddev(1 / math.sqrt(3 * hidden))

        def weight(param, start=0, stop=None, suffix=""):
            shape = [gates, hidden] if gates else [hidden]
            shape += param.shape[1:]
            views = param.views + (("reshape", (shape,)),)
            rows = ()
            if stop is not None:
                rows, shape = (slice(start, stop),), [stop - start, *shape[1:]]
                shape = shape[1:] if shape[0] == 1 else shape
            return walk.graph.weight(
                param.label + suffix, shape,
                (dataclasses.replace(param, views=views), rows),
                stddev=stddev if len(param.shape) > 1 else 0)

        self.of_x, self.of_h = map(weight, params[:2])
        self.biases = [None, None]
        self.candidate = None
        if len(params) > 2 and cell == "gru":
            self.biases[0] = weight(params[2])
            # The candidate's bias is scaled by a gate, those of the gates not.
            self.candidate = weight(params[3], 2, 3, "/candidate")
            of_gates = weight(params[3], 0, 2, "/gates")
            self.of_gates = walk.add(
                "pad", node, [of_gates], "m!j->d!j", suffix=f"{k}.bias",
                sizes={"d": 3}, before=0, places=3, value=0)[0]
        elif len(params) > 2:
            self.biases = [weight(param) for param in params[2:]]
        elif cell == "gru":
            raise Unmappable("a GRU without biases")
        self.made = "gj" if gates else "j"

    def add(self, op, step, what, operands, rule, **more):
        return self.walk.add(op, self.node, operands, rule,
                             suffix=f"{self.k}.{step}{what}", **more)

    def product(self, step, what, x, weight, bias):
        rule = f"bi,{self.made}i" + (f"+{self.made}" if bias else "")
        return self.add("linear", step, what,
                        [x, weight] + ([bias] if bias else []),
                        f"{rule}->b{self.made}")[0]

    def __call__(self, steps, state, keeps):
        """The states h of each step, and the last ones. `keeps`: the last cell
        of an LSTM is read."""
        made, b = [], f"b{self.made}"
        h, c = (*state, None)[:2]
        for i, x in enumerate(steps):
            gates = self.product(i, ".ih", x, self.of_x, self.biases[0])
            recurrent = h and self.product(i, ".hh", h, self.of_h,
                                           self.biases[1])
            if self.cell == "gru":
                gates = self.add("broadcast_add", i, ".biases",
                                 [gates, self.of_gates], "bgj,gj->bgj")[0]
                more = [recurrent, h] if h else []
                h = self.add("gru_gates", i, "", [
                    gates, self.candidate, *more],
                    "bg!j,j" + (",bg!j,bj" if h else "") + "->bj")[0]
                made.append(h)
                continue
            if recurrent:
                gates = self.add("add", i, ".gates", [gates, recurrent],
                                 f"{b},{b}->{b}")[0]
            elif self.biases[1]:  # of a state that is zero
                gates = self.add("broadcast_add", i, ".gates",
                                 [gates, self.biases[1]],
                                 f"{b},{self.made}->{b}")[0]
            if self.cell == "lstm":
                h, c = (*self.add(
                    "lstm_gates", i, "", [gates] + [c] * bool(c),
                    "bg!j" + ",bj" * bool(c) + "->bj" +
                    (",bj" if keeps or i + 1 < len(steps) else "")), None)[:2]
            else:
                h = self.add(self.cell.removeprefix("rnn_"), i, "", [gates],
                             "bj->bj")[0]
            made.append(h)
        return made, ([h, c] if self.cell == "lstm" else [h])


# ---- Images --------------------------------------------------------------------


def each(value, directions, fallback=None):
    value = fallback if value is None or value == [] else value
    if not isinstance(value, (list, tuple)):
        value = [value]
    return list(value) * (directions // len(value))


def image(walk, node, x, features=False):
    """Images or signals, or where `features` is true features alone."""
    x = walk.exact(x, node)
    if (len(x.dims) not in ((2, 3, 4) if features else (3, 4)) or
            x.dims[0] != [walk.batch]):
        raise Unmappable("expected images (batch, channels, height, width), or "
                         "signals (batch, channels, length)")
    for dim in range(1, len(x.dims)):
        if dim > 1 or len(x.dims[1]) != 2:
            x = walk.joined(x, node, dim)
    return x


def letters_of_channels(x):
    return "c" if len(x.dims[1]) == 1 else "gc"


def letters_of_windows(x):
    """Of the image, the window and its places; signals have no height."""
    return ("h!w!", "k!l!", "yx") if len(x.dims) == 4 else ("w!", "l!", "x")


def of_image(walk, node, tensor, x, channels):
    """A result of the size that PyTorch says. A sequence stays one."""
    sizes = node.meta["val"].shape[2:]
    places = [[Atom(f"{node.name}.{name}", size, dim[0].letter)]
              for name, size, dim in zip("hw"[-len(sizes):], sizes, x.dims[2:])]
    y = Act(tensor, [*x.dims[0], *channels, *flatten(places)],
            [x.dims[0], channels, *places])
    if walk.atoms.changed:  # what reads it is of no use
        return y
    for dim in range(len(y.dims) - 1, 0, -1):
        if len(y.dims[dim]) == 1:
            y = walk.apart(y, node, dim)
    return y


def sides(name, values, without):
    """Attributes of both sides; what a signal has of the height."""
    height, width = values if len(values) == 2 else (without, values[0])
    return {f"{name}_height": height, f"{name}_width": width}


def window_attributes(stride, padding):
    top, left = padding if len(padding) == 2 else (0, padding[0])
    return {"pad_top": top, "pad_left": left, **sides("stride", stride, 1)}


def groups_of(walk, x, out_name, out_size, groups):
    """Channels of both sides, as groups and channels in a group where there
    are several groups."""
    channels, out = x.dims[1], walk.atoms.make(out_name, out_size, "c")
    if groups > 1:
        if len(channels) == 1:
            channels = walk.atoms.split(channels[0], groups)
        if len(out) == 1:
            out = walk.atoms.split(out[0], groups)
        if channels[0].extent != groups or out[0].extent != groups:
            raise Unmappable("groups that are not those of its neighbours")
    # A rule has not more than three letters of channels on both sides.
    if groups == 1 and len(channels) + len(out) > 3:
        out = [Atom(out_name, extent(out), "c")]
    return channels, out


def convolution(walk, node, x, weight, bias=None, stride=1, padding=0,
                dilation=1, groups=1):
    window = weight.shape[2:]
    n = len(window)
    stride, dilation = each(stride, n), each(dilation, n)
    if isinstance(padding, str):
        padding = [0] * n if padding == "valid" else [
            d * (k - 1) // 2 for d, k in zip(dilation, window)]
    padding = each(padding, n)
    x = image(walk, node, x)
    channels, out = groups_of(walk, x, f"{node.name}.c", weight.shape[0], groups)
    if walk.atoms.changed:
        return of_image(walk, node, x.tensor, x, out)
    into = "c" if len(channels) == 1 else "gc"
    made = "o" if len(out) == 1 else "gn" if groups > 1 else "pn"
    read = channels[1:] if groups > 1 else channels
    shape = [a.extent for a in out]
    full = shape + [a.extent for a in read] + list(window)
    stddev = math.sqrt(2 * groups / (weight.shape[0] * math.prod(window)))
    operands = [x.tensor, walk.graph.weight(weight.name, full, (weight, ()),
                                            stddev=stddev)]
    hw, kl, yx = letters_of_windows(x)
    rule = f"b{into}{hw},{made}{'c' if groups > 1 else into}{kl}"
    if bias is not None:
        operands.append(walk.vector(bias, shape))
        rule += f"+{made}"
    sizes = node.meta["val"].shape[2:]
    y = walk.add("conv2d", node, operands, f"{rule}->b{made}{yx}",
                 sizes=dict(zip(yx, sizes)), **sides("dilation", dilation, 1),
                 **sides("out", sizes, 1),
                 **window_attributes(stride, padding))[0]
    return of_image(walk, node, y, x, out)


def transposed_convolution(walk, node, x, weight, bias=None, stride=1,
                           padding=0, output_padding=0, groups=1, dilation=1):
    """Its weight is (in, out of a group, window)."""
    if not isinstance(weight, Param):
        raise Unmappable("expected a window of parameters")
    window = weight.shape[2:]
    n = len(window)
    x = image(walk, node, x)
    channels, out = groups_of(walk, x, f"{node.name}.c",
                              weight.shape[1] * groups, groups)
    if walk.atoms.changed:
        return of_image(walk, node, x.tensor, x, out)
    read = "n" if len(channels) == 1 else "gn" if groups > 1 else "pn"
    made = "c" if len(out) == 1 else "gc" if groups > 1 else "oc"
    shape = [a.extent for a in out]
    full = [a.extent for a in channels] + shape[groups > 1:] + list(window)
    stddev = math.sqrt(2 / (weight.shape[1] * math.prod(window)))
    matrix = walk.graph.weight(weight.name, full, (weight, ()), stddev=stddev)
    hw, kl, yx = letters_of_windows(x)
    sizes = node.meta["val"].shape[2:]
    y = walk.add("conv_transpose2d", node, [x.tensor, matrix],
                 f"b{read}{yx},{read}{'c' if groups > 1 else made}{kl}"
                 f"->b{made}{hw}", sizes=dict(zip(hw.replace("!", ""), sizes)),
                 **sides("dilation", each(dilation, n), 1),
                 **sides("image", sizes, 1),
                 **window_attributes(each(stride, n), each(padding, n)))[0]
    if bias is not None:
        rule = f"b{made}{hw}".replace("!", "")
        y = walk.add("broadcast_add", node, [y, walk.vector(bias, shape)],
                     f"{rule},{made}->{rule}", suffix="bias")[0]
    return of_image(walk, node, y, x, out)


def conv(walk, node, x, weight, bias=None, stride=1, padding=0, dilation=1,
         groups=1):
    arguments = (x, weight, bias, stride, padding, dilation, groups)
    if not isinstance(weight, Param):
        raise Unmappable("expected a window of parameters")
    window = weight.shape[2:]
    if (isinstance(x, Act) and x.tensor == "images" and groups == 1 and
            len(window) == 2 and each(stride, 2) == window and
            each(padding, 2) == [0, 0] and each(dilation, 2) == [1, 1] and
            window[0] == window[1] > 1):
        return Patches(node, arguments, list(node.meta["val"].shape))
    return convolution(walk, node, *arguments)


def patch_view(walk, node, x, *_):
    """The image of patches as a sequence: (b, h, places), then turned."""
    name, shape = operator_name(node), list(node.meta["val"].shape)
    flat = x.shape[:2] + [math.prod(x.shape[2:])]
    if not x.steps and name in ("flatten", "view", "reshape") and (
            shape == flat):
        return dataclasses.replace(x, shape=shape, steps=("flat",))
    if x.steps == ("flat",) and name in ("transpose", "permute") and (
            shape == [flat[0], flat[2], flat[1]]):
        return dataclasses.replace(x, shape=shape, steps=("flat", "turned"))
    return OPERATORS[name](walk, node, walk.tensor(x), *_)


def join_patches(walk, node, first, patches):
    """The patches of an image behind a class token: a dense layer. What differs
    between that place and the others is looked up (planner/io/
    huggingface_vit.cc)."""
    if not isinstance(first, Param) or patches.steps != ("flat", "turned"):
        raise Unmappable("expected a class token in front of patches")
    _, weight, bias, *_ = patches.arguments
    out, channels, height, width = weight.shape
    places = patches.shape[1] + 1
    graph, conv = walk.graph, patches.node
    s = walk.atoms.make("sequence.patches", places, "s")[0]
    h = walk.atoms.make(f"{conv.name}.out", out, "f")[0]
    walk.places[s] = "positions"
    graph.seq_len = places
    images = graph.input("patches", [graph.batch, places, channels, height,
                                     width], walk.args.dtype)
    matrix = graph.weight(
        weight.name, weight.shape, (weight, ()),
        stddev=walk.stddev(1 / math.sqrt(3 * math.prod(weight.shape[1:]))))
    path = weight.name.rpartition(".")[0]
    x = walk.add("linear", conv, [images, matrix], "bscuv,ocuv->bso",
                 path=path)[0]

    def add(param, ids, suffix):
        nonlocal x
        table = graph.weight(param.name, [1, out], (dataclasses.replace(
            param, views=()), ()), stddev=0 if suffix == "bias" else
            walk.stddev(0.02))
        row = walk.add("embedding", conv, [
            walk.extra(ids, [walk.batch, s]), table], "bs,vh->bsh", path=path,
            suffix=suffix)[0]
        x = walk.add("add", conv, [x, row], "bsh,bsh->bsh", path=path,
                     suffix=f"add_{suffix}")[0]

    if bias is not None:
        add(bias, "patch_rows", "bias")
    add(first, "positions", "class")
    return Act(x, [walk.batch, s, h], [[walk.batch], [s], [h]])


def param_elementwise(walk, node, name, *operands, **keywords):
    """A row for each place that is added to a sequence; 1 + a scale."""
    param = next(v for v in operands if isinstance(v, Param))
    other = next((v for v in operands if v is not param), None)
    if isinstance(other, (Part, Patches)):
        other = walk.tensor(other)
    if is_constant(other) and name == "add" and number_of(other) is not None:
        return dataclasses.replace(
            param, views=param.views + (("add", (number_of(other),)),))
    if name == "add" and isinstance(other, Act) and len(other.dims) == 3:
        s, h = other.dims[1:]
        rows = [n for n in param.shape if n != 1]
        if len(s) == 1 and s[0] in walk.places and rows == [
                s[0].extent, extent(h)]:
            x = walk.plain(other)
            row = walk.lookup(
                node, param, *rows, (param, ()),
                walk.extra(walk.places[s[0]], [walk.batch, s[0]]),
                param.name.rpartition(".")[2])
            letters = letters_of(x.own)
            y = walk.add("add", node, [x.tensor, row],
                         f"{letters},{letters}->{letters}")[0]
            return dataclasses.replace(x, tensor=y)
    return elementwise(walk, node, *(
        walk.tensor(v) if isinstance(v, Param) else v for v in operands),
        **keywords)


def batch_norm(walk, node, x, scale, shift, running_mean=None,
               running_var=None, training=True, momentum=0.1, epsilon=1e-5,
               *_):
    x = image(walk, node, x, features=True)
    size, c = [a.extent for a in x.dims[1]], letters_of_channels(x)
    operands = [x.tensor, walk.vector(scale, size, constant=1),
                walk.vector(shift, size)]
    images = f"b{c}" + ("", "w", "hw")[len(x.dims) - 2]
    rule, groups = f"{images},{c},{c}->{images}", walk.args.batch_norm_groups
    if groups > 1:
        y = walk.add("ghost_batch_norm", node, operands,
                     f"{rule},b{c},b{c}", epsilon=epsilon, groups=groups)[0]
    else:
        y = walk.add("batch_norm", node, operands, f"{rule},{c},{c}",
                     epsilon=epsilon)[0]
    return dataclasses.replace(x, tensor=y)


def pool(walk, node, x, op, window, stride, padding, **more):
    x = image(walk, node, x)
    n = len(x.dims) - 2
    window, padding = each(window, n), each(padding, n)
    stride = each(stride, n, window)
    c = letters_of_channels(x)
    hw, _, yx = letters_of_windows(x)
    sizes = node.meta["val"].shape[2:]
    y = walk.add(op, node, [x.tensor], f"b{c}{hw}->b{c}{yx}",
                 sizes=dict(zip(yx, sizes)), **sides("window", window, 1),
                 **sides("out", sizes, 1), **more,
                 **window_attributes(stride, padding))[0]
    return of_image(walk, node, y, x, x.dims[1])


def max_pool(walk, node, x, window, stride=None, padding=0, dilation=1,
             ceil=False):
    if set(each(dilation, 2)) != {1}:
        raise Unmappable("a dilated window")
    return pool(walk, node, x, "max_pool", window, stride, padding)


def average_pool(walk, node, x, window, stride=None, padding=0, ceil=False,
                 count_pad=True, divisor=None):
    if divisor is not None:
        raise Unmappable("a divisor of its own")
    return pool(walk, node, x, "average_pool", window, stride, padding,
                count_pad=count_pad)


def adaptive_pool(walk, node, x, size):
    x = image(walk, node, x)
    into = x.shape[2:]
    out = each(size, len(into))
    if set(out) == {1}:
        return image_mean(walk, node, x, keep=True)
    if out == into:
        return x
    if any(i % o for i, o in zip(into, out)):
        raise Unmappable(f"windows of several sizes, {into} to {out}")
    window = [i // o for i, o in zip(into, out)]
    return pool(walk, node, x, "average_pool", window, None, 0, count_pad=1)


def image_mean(walk, node, x, keep):
    x = image(walk, node, x)
    c = letters_of_channels(x)
    if len(x.dims) == 4:
        y = walk.add("image_mean", node, [x.tensor], f"b{c}hw->b{c}")[0]
    else:
        y = walk.add("reduce_mean", node, [x.tensor], f"b{c}w->b{c}")[0]
    places = len(x.dims) - 2
    return Act(y, x.own[:-places],
               x.dims[:2] + ([[]] * places if keep else []))


def joined(walk, node, parts, dim):
    """Tensors beside each other along a dimension, such as channels."""
    parts = [walk.joined(walk.exact(p, node), node, dim) for p in parts]
    joint = parts[0]
    for p in parts:
        if len(p.dims[dim]) != 1 or p.dims[dim][0].letter == "b":
            raise Unmappable("joins a dimension that is several, or samples")
        if [a.extent for d, dims in enumerate(p.dims) if d != dim
                for a in dims] != [
                a.extent for d, dims in enumerate(joint.dims) if d != dim
                for a in dims]:
            raise Unmappable("joins tensors of different sizes")
    at = len(flatten(joint.dims[:dim]))
    # An operator joins six.
    for first in range(1, len(parts), 5):
        some = [joint] + parts[first:first + 5]
        letters = Letters()
        letters.of = {letter: letter for letter in "mnopqrd"}
        front, behind = letters(joint.own[:at]), letters(joint.own[at + 1:])
        rule = ",".join(f"{front}{letter}!{behind}"
                        for letter, _ in zip("mnopqr", some))
        count = sum(p.shape[dim] for p in some)
        y = walk.add("concat_channels", node, [p.tensor for p in some],
                     f"{rule}->{front}d!{behind}", sizes={"d": count},
                     channels=count)[0]
        made = Atom(f"{y}.c{first}", count, joint.dims[dim][0].letter)
        joint = Act(y, [*joint.own[:at], made, *joint.own[at + 1:]],
                    [*joint.dims[:dim], [made], *joint.dims[dim + 1:]])
    return walk.apart(joint, node, dim) if len(parts) > 1 else joint


def standardised(walk, node, x, groups, scale, shift, epsilon):
    """(x - mean) / sqrt(variance + epsilon) over each group of channels and
    all places, then a scale and shift of each channel."""
    x = image(walk, node, x, features=True)
    channels = x.dims[1]
    all_channels = extent(channels)
    if len(channels) == 1 and 1 < groups < all_channels:
        walk.atoms.split(channels[0], groups)
        return x  # not in this walk
    c = "c" if len(channels) == 1 else "gc"
    hw = ("", "w", "hw")[len(x.dims) - 2]
    if groups in (1, all_channels):
        kept = "b" if groups == 1 else f"b{c}"
    elif channels[0].extent == groups:
        kept = "bg"
    else:
        raise Unmappable("groups that are not those of its neighbours")
    add = functools.partial(walk.add, node=node)
    mean = lambda t, suffix: add("reduce_mean", operands=[t],
                                 rule=f"b{c}{hw}->{kept}", suffix=suffix)[0]
    each_of = f"b{c}{hw}"
    rule = f"{each_of},{kept}->{each_of}"
    y = add("subtract", operands=[x.tensor, mean(x.tensor, "mean")], rule=rule,
            suffix="centred")[0]
    squares = add("multiply", operands=[y, y],
                  rule=f"{each_of},{each_of}->{each_of}", suffix="squares")[0]
    deviation = mean(squares, "variance")
    for op, more in (("offset", {"amount": epsilon}), ("sqrt", {})):
        deviation = add(op, operands=[deviation], rule=f"{kept}->{kept}",
                        suffix=op, **more)[0]
    y = add("divide", operands=[y, deviation], rule=rule, suffix="divide")[0]
    size = [a.extent for a in channels]
    for op, param, constant in (("multiply", scale, 1),
                                ("broadcast_add", shift, 0)):
        if param is not None:
            y = add(op, operands=[y, walk.vector(param, size, constant)],
                    rule=f"{each_of},{c}->{each_of}",
                    suffix="scale" if constant else "shift")[0]
    return dataclasses.replace(x, tensor=y)


def group_norm(walk, node, x, groups, scale=None, shift=None, epsilon=1e-5, *_):
    return standardised(walk, node, x, groups, scale, shift, epsilon)


def instance_norm(walk, node, x, scale=None, shift=None, running_mean=None,
                  running_var=None, of_input=True, momentum=0.1, epsilon=1e-5,
                  *_):
    if not of_input:
        raise Unmappable("an instance norm of running statistics")
    return standardised(walk, node, x, x.shape[1], scale, shift, epsilon)


def prelu(walk, node, x, slope):
    """max(x, 0) + slope min(x, 0), a slope for each channel or for all."""
    x = walk.exact(x, node)
    own = letters_of(x.own)
    if not isinstance(slope, Param) or len(x.dims) < 2:
        raise Unmappable("expected a slope that is a parameter")
    if slope.shape == [1]:
        shape, read = [1], next(c for c in "uvz" if c not in own)
        rule = f"{own},{read}!->{own}"
    else:
        shape = [a.extent for a in x.dims[1]]
        at = len(x.dims[0])
        rule = f"{own},{own[at:at + len(shape)]}->{own}"
    zero = dataclasses.replace(x, samples=POINTS.clamp(max=0), last=node)
    y = walk.add("multiply", node, [walk.tensor(zero).tensor,
                                    walk.vector(slope, shape, constant=0.25)],
                 rule, suffix="below")[0]
    above = walk.tensor(dataclasses.replace(x, samples=POINTS.clamp(min=0),
                                            last=node)).tensor
    return dataclasses.replace(x, tensor=walk.add(
        "add", node, [above, y], f"{own},{own}->{own}", suffix="add")[0])


def pixel_shuffle(walk, node, x, factor):
    """Channels (c, r, r) as blocks of pixels."""
    x = walk.exact(x, node)
    _, channels, height, width = x.dims
    if len(channels) < 3:
        last = channels[-1]
        if len(channels) == 1:
            last = walk.atoms.split(last, last.extent // factor ** 2)[-1]
        walk.atoms.split(last, factor)
        return x  # not in this walk
    c, *block = channels
    return x.viewed([x.dims[0], [c], height + block[:1], width + block[1:]])


# ---- The loss ------------------------------------------------------------------

def cross_entropy(walk, node, logits, labels, weight=None, reduction=1,
                  ignored=-100, smoothing=0):
    if weight is not None or reduction != 1 or smoothing:
        raise Unmappable("expected a mean without weights or smoothing")
    labels = walk.plain(labels, "labels")
    if labels.tensor != "labels":
        raise Unmappable("expected labels that are the model's input 'labels'")
    return add_loss(walk, walk.plain(logits), "loss")


def add_loss(walk, x, name):
    """Mean cross-entropy; a negative label is not counted."""
    if x.own[0] != walk.batch or len(x.own) not in (2, 3):
        raise Unmappable(f"logits of {x.shape}: expected a number for each "
                         "class, of each sample or token")
    labels = walk.graph.input("labels", walk.graph.extents(x.own[:-1]),
                              "int32")
    b = "bs"[:len(x.own) - 1]
    count = walk.graph.add("count_labels", "count", "", [labels], f"{b}->")[0]
    loss = walk.graph.add("cross_entropy", name, "", [x.tensor, labels, count],
                          f"{b}v,{b},->,{b}")[0]
    return Loss(loss)


def alike(walk, node, tensors):
    """What a loss of elements does first."""
    shapes = [walk.tensor(x).shape for x in tensors]
    if any(shape != shapes[0] for shape in shapes):
        raise Unmappable(f"tensors of {shapes}: expected one shape")
    return tuple(tensors)


def element_loss(op, most_operands):
    """A mean over all elements. `most_operands`: those in front of the
    reduction, which come after predictions and targets, are weights."""
    def mapped(walk, node, x, targets, *more, reduction=None, **weights):
        more = list(more)
        if len(more) > most_operands:
            reduction = more.pop()
        if any(w is not None for w in [*more, *weights.values()]) or \
                reduction not in (None, 1):
            raise Unmappable("expected a mean without weights")
        x = walk.plain(x)
        targets = walk.plain(targets, "targets")
        if targets.tensor != "targets":
            raise Unmappable(
                "expected targets that are the model's input 'targets'")
        letters = {2: "bf", 3: "bsf", 4: "bchw"}.get(len(x.own))
        if letters is None or x.own[0] != walk.batch or \
                walk.graph.extents(x.own) != walk.graph.extents(targets.own):
            raise Unmappable(f"predictions of {x.shape}, targets of "
                             f"{targets.shape}: expected as many, of samples")
        return Loss(walk.graph.add(op, "loss", "", [x.tensor, targets.tensor],
                                   f"{letters},{letters}->", weight=1)[0])
    return mapped


# ---- The table -----------------------------------------------------------------

def inline(walk, node, *operands, **keywords):
    """A graph within the graph, such as one without gradients."""
    at = next(i for i, v in enumerate(operands)
              if isinstance(v, torch.fx.GraphModule))
    arguments = iter(operands[at + 1:])
    for inner in operands[at].graph.nodes:
        if inner.op == "placeholder":
            walk.values[inner] = next(arguments)
        elif inner.op == "output":
            return walk.of(inner.args[0])
        else:
            walk.values[inner] = walk.map(inner)


# What elementwise nodes become where an operand is no tensor yet.
SPECIAL = [
    ((Statistic, Normed), statistic),
    (Scores, scores_elementwise),
    (Bias, bias_elementwise),
    (Chosen, chosen_elementwise),
    (Param, param_elementwise),
    (Neighbours, neighbours_elementwise),
    (Part, part_elementwise),
]

# By operator of PyTorch (aten, without the overload): how it is mapped.
OPERATORS = {
    **dict.fromkeys(
        ["abs", "add", "add_", "cos", "div", "div_", "erf", "exp", "gelu",
         "hardsigmoid", "hardsigmoid_", "hardswish", "hardswish_",
         "leaky_relu", "log",
         "masked_fill", "mul", "mul_", "neg", "pow", "reciprocal", "relu",
         "relu_", "rsqrt", "rsub", "sigmoid", "silu", "silu_", "sin",
         "maximum", "minimum",
         "softplus", "sqrt", "square", "sub", "tanh", "where"], elementwise),
    **dict.fromkeys(["clamp", "hardtanh", "hardtanh_", "relu6"], clamped),
    **dict.fromkeys(
        ["_assert_tensor_metadata", "_to_copy", "alias", "clone", "contiguous",
         "lift_fresh_copy", "to", "type_as"], identity),
    **dict.fromkeys(
        ["_unsafe_view", "flatten", "reshape", "unflatten", "view"],
        viewing(reshaped)),
    **dict.fromkeys(["adaptive_avg_pool1d", "adaptive_avg_pool2d"],
                    adaptive_pool),
    **dict.fromkeys(["avg_pool1d", "avg_pool2d"], average_pool),
    **dict.fromkeys(["conv1d", "conv2d"], conv),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d"],
                    transposed_convolution),
    **dict.fromkeys(["max_pool1d", "max_pool2d"], max_pool),
    **dict.fromkeys(["constant_pad_nd", "pad"], padded),
    **dict.fromkeys(["reflection_pad1d", "reflection_pad2d"],
                    padded_by("reflect")),
    **dict.fromkeys(["replication_pad1d", "replication_pad2d"],
                    padded_by("replicate")),
    **dict.fromkeys(["upsample_linear1d", "upsample_bilinear2d"],
                    resized(linear=True)),
    **dict.fromkeys(["upsample_nearest1d", "upsample_nearest2d"],
                    resized(linear=False)),
    "addmm": addmm,
    "amax": reduction("reduce_max"),
    "baddbmm": baddbmm,
    "batch_norm": batch_norm,
    "binary_cross_entropy_with_logits":
        element_loss("binary_cross_entropy", 2),
    "bmm": matmul,
    "broadcast_tensors": alike,
    "cat": cat,
    "chunk": chunk,
    "cross_entropy_loss": cross_entropy,
    "gather": gather,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "pixel_shuffle": pixel_shuffle,
    "prelu": prelu,
    "detach": detached,
    "dropout": dropout,
    "dropout_": dropout,
    "einsum": einsum,
    "embedding": embedding,
    "expand": viewing(expanded),
    "gru": recurrent("gru"),
    "layer_norm": layer_norm,
    "linear": linear,
    "log_softmax": lambda walk, node, x, dim, dtype=None: softmax_of(
        walk, node, x, dim % len(node.meta["val"].shape), "log_softmax"),
    "lstm": recurrent("lstm"),
    "matmul": matmul,
    "mean": mean,
    "mm": matmul,
    "mse_loss": element_loss("mean_squared_error", 0),
    "permute": viewing(permuted),
    "repeat_interleave": viewing(repeated),
    "rms_norm": rms_norm_whole,
    "rnn_relu": recurrent("rnn_relu"),
    "rnn_tanh": recurrent("rnn_tanh"),
    "scaled_dot_product_attention": scaled_dot_product,
    "scatter_add": scatter_add,
    "select": select,
    "slice": sliced,
    "softmax": softmax,
    "split": split,
    "split_with_sizes": split,
    "squeeze": viewing(squeezed),
    "stack": stack,
    "sum": total,
    "t": viewing(lambda walk, node, x: x.dims[::-1]),
    "tessera.experts": experts,
    "topk": topk,
    "transpose": viewing(transposed),
    "unbind": unbind,
    "unsqueeze": viewing(unsqueezed),
    "view_as_complex": as_complex,
    "view_as_real": as_real,
    "wrap_with_autocast": inline,
    "wrap_with_set_grad_enabled": inline,
}


# ---- Tracing -------------------------------------------------------------------

class Traced:
    """PyTorch's graph of a module: its nodes in front of one output."""

    def __init__(self, module, inputs, args, name):
        self.module, self.name = module, name
        self.leaves = {path for path, part in module.named_modules()
                       if not list(part.children())}
        first = {}  # tied parameters have the first one's name
        for path, parameter in module.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), path)
        self.parameters = {
            path: first[id(parameter)] for path, parameter in
            module.named_parameters(remove_duplicate=False)}
        graph, placeholders = (self.make_fx(inputs) if args.fx else
                               self.trace(inputs))
        self.inputs, self.values = [], {}
        for node, (kind, value) in placeholders.items():
            if kind == "input":
                self.inputs.append((node, *value))
            else:
                self.values[node] = value
        outputs = torch.utils._pytree.tree_leaves(
            next(n for n in graph.nodes if n.op == "output").args)
        outputs = [n for n in outputs if isinstance(n, torch.fx.Node)]
        if args.output >= len(outputs):
            refuse(f"{name}: has {len(outputs)} outputs, --output "
                     f"{args.output} is none of them")
        self.output = outputs[args.output]
        needed = {self.output}
        for node in reversed(graph.nodes):
            changed = getattr(node.target, "__name__", "").split(".")[0]
            in_place = (changed.endswith("_") and
                        not changed.endswith("__") and node.args and
                        node.args[0] in needed)
            if node in needed or in_place:
                needed |= {node, *node.all_input_nodes}
        self.nodes = [n for n in graph.nodes if n in needed]

    def trace(self, inputs):
        try:
            return self.export(inputs)
        except Exception as error:  # of any kind, says its documentation
            lines = str(error).strip().splitlines()
            print(f"torch.export: {lines[0] if lines else error!r}; tracing by "
                  "torch.fx instead", file=sys.stderr)
            return self.make_fx(inputs)

    def export(self, inputs):
        positional = tuple(inputs) if isinstance(inputs, tuple) else ()
        by_name = {} if positional else inputs
        with torch.no_grad(), masks_as_given():
            program = torch.export.export(self.module, positional, by_name,
                                          strict=False)
        constants = {**program.state_dict, **program.constants}
        given = dict(self.module.named_parameters(remove_duplicate=False))
        kinds = torch.export.graph_signature.InputKind
        placeholders = {}
        nodes = {n.name: n for n in program.graph.nodes}
        for spec in program.graph_signature.input_specs:
            node = nodes.get(spec.arg.name)
            if spec.kind == kinds.USER_INPUT:
                if node is None or not isinstance(
                        node.meta.get("val"), torch.Tensor):
                    continue
                placeholders[node] = "input", (node.name, node.meta["val"])
            elif spec.kind == kinds.PARAMETER:
                placeholders[node] = "value", Param(
                    self.parameters[spec.target],
                    list(given[spec.target].shape))
            else:
                placeholders[node] = "value", constants[spec.target]
        return program.graph, placeholders

    def make_fx(self, inputs):
        from torch.fx.experimental.proxy_tensor import make_fx
        names = [None] * len(inputs) if isinstance(inputs, tuple) else list(
            inputs)
        tensors = list(inputs) if isinstance(inputs, tuple) else list(
            inputs.values())
        state = {**dict(self.module.named_parameters(remove_duplicate=False)),
                 **dict(self.module.named_buffers(remove_duplicate=False))}

        def call(given, *tensors):
            by_name = {n: t for n, t in zip(names, tensors) if n}
            by_place = [t for n, t in zip(names, tensors) if not n]
            return torch.func.functional_call(self.module, given,
                                              tuple(by_place), by_name)

        with module_stacks(self.module), masks_as_given():
            traced = make_fx(call, tracing_mode="fake", pre_dispatch=True,
                             record_stack_traces=True,
                             _allow_non_fake_inputs=True)(state, *tensors)
        nodes = [n for n in traced.graph.nodes if n.op == "placeholder"]
        placeholders = {}
        for node, (path, value) in zip(nodes, state.items()):
            placeholders[node] = "value", (
                Param(self.parameters[path], list(value.shape))
                if path in self.parameters else value)
        for i, node in enumerate(nodes[len(state):]):
            placeholders[node] = "input", (names[i] or f"input_{i}",
                                           tensors[i])
        return traced.graph, placeholders

    def attribute(self, node):
        value = node.graph.owning_module
        for part in node.target.split("."):
            value = getattr(value, part)
        return value

    def is_leaf(self, path):
        return path in self.leaves


@contextlib.contextmanager
def masks_as_given():
    """nn.Transformer asks whether its mask is causal, by its elements, which no
    tracer allows: masks are told apart here."""
    from torch.nn.modules import transformer
    asked = getattr(transformer, "_detect_is_causal_mask", None)
    if asked:
        transformer._detect_is_causal_mask = (
            lambda mask, is_causal=None, size=None: bool(is_causal))
    try:
        yield
    finally:
        if asked:
            transformer._detect_is_causal_mask = asked


@contextlib.contextmanager
def module_stacks(module):
    """Nodes that are traced within know the module that they are in."""
    from torch.fx import traceback
    handles, stack = [], {}

    def enter(path, part, *_):
        stack[path] = (path, type(part))
        traceback.current_meta["nn_module_stack"] = dict(stack)

    def leave(path, *_):
        del stack[path]
        traceback.current_meta["nn_module_stack"] = dict(stack)

    for path, part in module.named_modules():
        handles += [
            part.register_forward_pre_hook(functools.partial(enter, path)),
            part.register_forward_hook(functools.partial(leave, path))]
    try:
        with traceback.preserve_node_meta():
            yield
    finally:
        for handle in handles:
            handle.remove()


# ---- Models --------------------------------------------------------------------

@contextlib.contextmanager
def without_memory():
    """Parameters that are made within have shapes and no memory; buffers, of
    which some are constants of the computation, are as they are."""
    register = nn.Module.register_parameter

    def register_meta(module, name, parameter):
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"),
                                     parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def on_cpu(module):
    """Parameters without memory as tensors of the CPU, all of whose elements
    are one: tracing wants a single device."""
    made = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(
                        torch.zeros((), dtype=parameter.dtype).expand(
                            parameter.shape), parameter.requires_grad)
                part._parameters[name] = made[parameter]
    return module


def tokens_of(args):
    if not args.seq_len:
        refuse(f"{args.model}: needs --seq-len N")
    return torch.zeros(TRACED_BATCH, args.seq_len, dtype=torch.long)


def hugging_face(args):
    import transformers
    path = pathlib.Path(args.model)
    try:
        config = transformers.AutoConfig.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        refuse(f"{args.model}: no config: {str(error).splitlines()[0]}")
    for key, value in (setting.split("=", 1) for setting in args.set):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
        if not hasattr(config, key):
            refuse(f"{args.model}: has no key '{key}' (--set)")
        setattr(config, key, value)
    config.use_cache = False
    kinds = (config.architectures or [])[:1]
    kind = getattr(transformers, kinds[0], None) if kinds else None
    autos = [transformers.AutoModelForCausalLM,
             transformers.AutoModelForSeq2SeqLM,
             transformers.AutoModelForMaskedLM,
             transformers.AutoModelForImageClassification]
    if kind is None:
        auto = next((auto for auto in autos
                     if type(config) in auto._model_mapping.keys()), None)
        if auto is None:
            refuse(f"{args.model}: '{config.model_type}' is no language "
                     "model and no classifier of images; give "
                     "MODULE:FUNCTION")
    if args.weights and (not path.exists() or any(path.glob("*.safetensors"))):
        module = (kind or auto).from_pretrained(
            args.model, config=config, dtype=torch.float32)
    else:
        module = kind(config) if kind else auto.from_config(config)
    if module.main_input_name == "pixel_values":
        size = each(args.image_size or getattr(config, "image_size", 224), 2)
        return module, {"pixel_values": torch.zeros(
            TRACED_BATCH, config.num_channels, *size)}
    inputs = {"input_ids": tokens_of(args)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens_of(args)
        if args.source_len:
            inputs["input_ids"] = inputs["input_ids"].new_zeros(
                TRACED_BATCH, args.source_len)
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = tokens_of(args)
    return module, inputs


def torchvision_model(args):
    import torchvision
    name = args.model.partition(":")[2]
    more = {}
    if name in ("inception_v3", "googlenet"):
        more = {"init_weights": False, "aux_logits": False}
    try:
        module = torchvision.models.get_model(name, weights=None, **more)
    except ValueError as error:
        refuse(f"{args.model}: {error}")
    size = args.image_size or (299 if name == "inception_v3" else 224)
    return module, (torch.zeros(TRACED_BATCH, 3, size, size),)


def own_model(args):
    module_name, function = args.model.split(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module_name), function)
    except (AttributeError, ModuleNotFoundError) as error:
        refuse(f"{args.model}: {error}")
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and
            isinstance(made[0], nn.Module)):
        refuse(f"{args.model}: expected (module, inputs), found "
                 f"{type(made).__name__}")
    module, inputs = made
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    again = lambda t: t[:1].expand(TRACED_BATCH, *t.shape[1:]).clone()
    if isinstance(inputs, dict):
        return module, {name: again(t) for name, t in inputs.items()}
    return module, tuple(again(t) for t in inputs)


def named_inputs(traced, encoder_decoder):
    """Inputs by the names that the data has (runtime/data)."""
    taken = set()
    named = []
    for node, name, tensor in traced.inputs:
        known = INPUTS.get(name)
        if encoder_decoder and name == "input_ids":
            known = "source"
        if known is None:
            known = "images" if tensor.is_floating_point() else "tokens"
        if known in taken:
            refuse(f"{traced.name}: inputs '{name}' and another one are both "
                     f"'{known}'; call them by what they are: "
                     f"{', '.join(sorted(set(INPUTS.values())))}")
        taken.add(known)
        named.append((node, known, tensor))
    return named


def behind_problems(traced, args, atoms, walk):
    """A walk that has problems behind those of `walk`, too."""
    atoms = copy.deepcopy(atoms)
    for _ in range(MOST_WALKS):
        atoms.changed = False
        again = Walk(traced, args, atoms, stands_in=True).run()
        if not atoms.changed:
            first = {node for node, _ in walk.problems}
            return again if first <= {n for n, _ in again.problems} else walk
    return walk


def export(args):
    """(the graph file's contents, the Walk, the module)."""
    if ":" in args.model and not os.path.exists(args.model):
        make = (torchvision_model if args.model.startswith("torchvision:")
                else own_model)
    else:
        make = hugging_face
    memory = contextlib.nullcontext() if args.weights else without_memory()
    torch.manual_seed(args.seed)
    with memory:
        module, inputs = make(args)
    module = on_cpu(module.train())
    replace_experts(module)
    path = pathlib.Path(args.model.partition(":")[2] or args.model)
    name = path.parent.name if path.name == "config.json" else path.name
    traced = Traced(module, inputs, args, args.name or name)
    config = getattr(module, "config", None)
    traced.inputs = named_inputs(
        traced, getattr(config, "is_encoder_decoder", False))
    atoms = Atoms()
    walk = Walk(traced, args, atoms).run()
    while atoms.changed:
        atoms.changed = False
        walk = Walk(traced, args, atoms).run()
    if walk.problems:
        walk = behind_problems(traced, args, atoms, walk)
    output = walk.values.get(traced.output)
    if not walk.problems:
        try:
            if not isinstance(output, Loss):
                if not args.loss:
                    raise Unmappable("is not a loss; --loss adds the mean "
                                     "cross-entropy of it")
                logits = output.logits if isinstance(
                    output, Chosen) else walk.tensor(output, "the output")
                output = add_loss(walk, walk.plain(logits), "loss")
            walk.graph.check_parts(dict(module.named_parameters()))
        except Unmappable as problem:
            walk.problems.append((traced.output, str(problem)))
    if walk.problems:
        return None, walk, module
    walk.graph.prune(output.tensor)
    blocks = blocks_of(walk.graph, module)
    return walk.graph.json(output.tensor, blocks), walk, module


def text_of(graph):
    """JSON with a line for each tensor and each node."""
    fields = []
    for key, value in graph.items():
        text = json.dumps(value)
        if value and isinstance(value, list) and isinstance(value[0], dict):
            rows = ",\n".join("  " + json.dumps(row) for row in value)
            text = f"[\n{rows}]"
        fields.append(f' "{key}": {text}')
    return "{\n" + ",\n".join(fields) + "}\n"


# ---- Weights -------------------------------------------------------------------

def weights_of(graph, walk, module):
    """The module's parameters as Tessera's weights, by name."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    dtype = torch.float64 if graph["dtype"] == "fp64" else torch.float32
    tensors = {}
    for tensor in graph["tensors"]:
        if tensor["kind"] != "TENSOR_KIND_WEIGHT":
            continue
        source, rows = walk.graph.weights[tensor["name"]]
        value = parameters[source.name].detach().to(dtype)
        for name, arguments in source.views:
            value = getattr(value, VIEWS.get(name, name))(*arguments)
        tensors[tensor["name"]] = value[rows].reshape(
            tensor["shape"]).contiguous()
    return tensors


# Operators that are no methods of tensors.
VIEWS = {"_unsafe_view": "reshape", "view": "reshape"}


def write_safetensors(path, tensors):
    header, end = {}, 0
    for name, tensor in tensors.items():
        size = tensor.element_size() * tensor.numel()
        header[name] = {"dtype": f"F{8 * tensor.element_size()}", "shape": list(tensor.shape),
                        "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.numpy().tobytes())


def parser():
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
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
    made.add_argument("--name", help="of the graph")
    made.add_argument("--weights", metavar="FILE",
                      help="write the module's parameters, too, as safetensors "
                      "that 'tessera run --load' reads")
    made.add_argument("--seed", type=int, default=0,
                      help="of parameters, for --weights")
    return made


def main():
    args = parser().parse_args()
    for path in filter(None, (args.out, args.weights)):
        folder = pathlib.Path(path).absolute().parent
        if not os.access(folder, os.W_OK):
            refuse(f"{path}: cannot write into {folder}")
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
    unused = [name for name, _ in module.named_parameters()
              if name not in used]
    if unused:
        print(f"{args.model}: the loss does not depend on {', '.join(unused)}",
              file=sys.stderr)
    pathlib.Path(args.out).write_text(text_of(graph))
    if args.weights:
        write_safetensors(args.weights, weights_of(graph, walk, module))
    count = sum(math.prod(t["shape"]) for t in graph["tensors"]
                if t["kind"] == "TENSOR_KIND_WEIGHT")
    print(f"{args.out}: {len(graph['nodes'])} operators in "
          f"{len(graph['blocks'])} blocks, {count:,} parameters")


if __name__ == "__main__":
    main()
