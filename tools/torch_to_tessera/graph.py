"""Tessera's graph while it is built (proto/graph.proto)."""

import json
import math
import re

from .problems import Unmappable

MOST_DIMENSIONS = 6       # of a tensor of a graph (planner/ir/index_rule.h)
MOST_FACTORS = 10         # of a rule (planner/ir/index_rule.h)
MOST_CONSTANTS = 1 << 22  # numbers of all of a graph (planner/ir/graph.h)
# Inputs by the names that models give them; the others by what they hold.
INPUTS = {"input_ids": "tokens", "decoder_input_ids": "tokens",
          "token_type_ids": "segments", "position_ids": "positions",
          "pixel_values": "images", "labels": "labels", "tokens": "tokens",
          "source": "source", "segments": "segments", "images": "images",
          "targets": "targets"}

# Which operands are whole numbers (OpDef::integer_operands); of other operators
# none.
INTEGERS = {"attention": (3, 4), "attention_alibi": (3, 4),
            "attention_bidirectional": (3, 4), "attention_relative": (3, 4),
            "count_labels": (0,), "cross_entropy": (1,), "embedding": (0,),
            "gather": (1,), "moe_collect": (1,), "moe_dispatch": (1,),
            "one_hot": (0,), "scatter_add": (1,)}

# What inputs are called, and the nodes of a loss.
RESERVED = {*INPUTS.values(), "count", "loss", "patch_rows", "patches",
            "source_positions", "zeros"}


class Graph:
    """Tessera's graph while it is built (proto/graph.proto)."""

    def __init__(self, args, name):
        self.batch, self.dtype, self.name = args.global_batch, args.dtype, name
        self.tensors, self.nodes, self.paths = {}, {}, {}
        self.weights = {}  # tensor -> (Param, start and stop by dimension …)
        self.seq_len = 1
        self.salts = 0
        self.numbers = 0  # of constants
        self.at = None    # PyTorch's node that is mapped
        # (node, problem): parameters that are read in several forms, which may
        # be one when a further walk has taken apart what reads them.
        self.conflicts = []
        self.read_twice = set()  # parameters of which that is so
        # Tensors whose features are in another order: by tensor the dimension
        # and, of that, the ranges that are.
        self.in_pairs = {}

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

    def constant(self, name, shape, values, dtype=None):
        """Numbers that are known, and not trained."""
        if name in RESERVED:
            name += ".constant"
        if name in self.tensors:
            return name
        if len(shape) > MOST_DIMENSIONS:
            raise Unmappable(f"a constant of {len(shape)} dimensions: a tensor "
                             f"has at most {MOST_DIMENSIONS}")
        if any(math.isnan(value) for value in values):
            raise Unmappable("a constant with elements that are no numbers")
        self.numbers += len(values)
        if self.numbers > MOST_CONSTANTS:
            raise Unmappable(f"a constant of {len(values):,} numbers: all of a "
                             f"graph have at most {MOST_CONSTANTS:,}")
        spelled = {math.inf: "Infinity", -math.inf: "-Infinity"}
        self.tensors[name] = {
            "name": name, "kind": "TENSOR_KIND_INPUT", "shape": shape,
            "dtype": dtype or self.dtype,
            "values": [spelled.get(value, value) for value in values]}
        return name

    def weight(self, name, shape, source, stddev=0, constant=0):
        """`source`: what of the module it is, for weights_of."""
        if name in RESERVED:
            name += ".parameter"
        other = self.tensors.get(name, {}).get("shape", shape)
        if other != shape:
            problem = (f"parameter '{name}' is read as {shape} and as {other}")
            self.read_twice.add(source[0].name)
            if math.prod(other) != math.prod(shape):
                raise Unmappable(problem)
            self.conflicts.append((self.at, problem))
            name = self.unique(name)
        elif name in self.tensors:
            if self.weights[name] != source:
                self.read_twice.add(source[0].name)
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

    def pairs_behind(self, op, operands, rule):
        """What is in another order of a node's result."""
        problem = Unmappable("reads what a rotary embedding of neighbours "
                             "makes, which only attention may")
        if op not in ("transpose", "reshape", "resample", "concat_channels"):
            raise problem
        left, right = rule.replace("!", "").split("->")
        inputs = left.split(",")
        made = [i for i, letter in enumerate(right) if letter not in left]
        found, joined, begin = set(), [], 0
        for letters, operand in zip(inputs, operands):
            gone = [i for i, letter in enumerate(letters)
                    if letter not in right]
            axis, ranges = self.in_pairs.get(operand, (None, ()))
            if axis is None or axis not in gone:
                found.add(axis if axis is None else
                          (right.index(letters[axis]), ranges))
            else:
                joined += [(begin + a, begin + b) for a, b in ranges]
            begin += self.tensors[operand]["shape"][gone[0]] if gone else 0
        if joined and op == "concat_channels" and found <= {None}:
            return made[0], tuple(joined)
        if joined or len(found) != 1:  # what is not alike
            raise problem
        return found.pop()

    def add(self, op, name, path, operands, rule, integers=(), sizes=None,
            alike=False, **attributes):
        """Adds a node and returns the names of its results. `sizes`: extents
        of letters that no operand has; `alike`: all results are of the graph's
        type, not the first alone."""
        name = self.unique(name)
        if self.in_pairs.keys() & set(operands) and (
                not op.startswith("attention")):
            self.in_pairs[name] = self.pairs_behind(op, operands, rule)
        sizes = dict(sizes or {})
        left, right = rule.replace("!", "").split("->")
        count = len(set(rule) - set(",+->!"))
        if count > MOST_FACTORS:
            raise Unmappable(f"a rule of {count} dimensions: has at most "
                             f"{MOST_FACTORS}")
        self.check_integers(op, operands)
        for letters, tensor in zip(re.split("[,+]", left), operands):
            sizes.update(zip(letters, self.tensors[tensor]["shape"]))
        sample = self.check_samples(left, right, operands)
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
            if sample and sample in letters:
                tensor["sample_dim"] = letters.index(sample)
            self.tensors[tensor["name"]] = tensor
            results.append(tensor["name"])
        self.paths[name] = path
        self.nodes[name] = {
            "name": name, "op": op, "rule": rule,
            "attributes": [{"name": key, "value": float(value)}
                           for key, value in sorted(attributes.items())],
            "operands": list(operands), "results": results}
        return results

    def check_integers(self, op, operands):
        expected = (1,) if op.startswith("rotary") else INTEGERS.get(op, ())
        for i, tensor in enumerate(operands):
            is_whole = self.tensors[tensor]["dtype"] == "int32"
            if is_whole and i not in expected:
                raise Unmappable(f"'{tensor}' is of whole numbers, which "
                                 f"'{op}' does not read")
            if not is_whole and i in expected:
                raise Unmappable(f"'{tensor}' is not of whole numbers, which "
                                 f"'{op}' reads")

    def check_samples(self, left, right, operands):
        """The letter of samples in a rule; "" where no operand has any."""
        of = {letters[self.tensors[tensor]["sample_dim"]]
              for letters, tensor in zip(re.split("[,+]", left), operands)
              if self.tensors[tensor].get("sample_dim", math.inf) <
              len(letters)}
        if len(of) > 1:
            raise Unmappable("computes with pairs of samples, and batches are "
                             "cut into microbatches")
        sample = "".join(of)
        # (Statistics behind it may be of all samples.)
        first = right.split(",")[0]
        if first and sample not in first:
            raise Unmappable("its result is not of each sample, and batches "
                             "are cut into microbatches")
        return sample

    def overlapping(self, parameters):
        """Those of which parts are read that overlap: parts of a parameter are
        trained apart."""
        read = {}
        for name, (source, _) in self.weights.items():
            read.setdefault(source.name, []).append(
                math.prod(self.tensors[name]["shape"]))
        return {name for name, counts in read.items()
                if name in parameters and
                sum(counts) > parameters[name].numel()}

    def prune(self, loss):
        """Leaves what the loss depends on."""
        needed, nodes = {loss}, []
        for node in reversed(self.nodes.values()):
            if needed & set(node["results"]):
                nodes.append(node)
                needed |= set(node["operands"]) | set(node["results"])
        self.nodes = {node["name"]: node for node in reversed(nodes)}
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
