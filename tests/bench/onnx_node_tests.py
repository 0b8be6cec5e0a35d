#!/usr/bin/env python3
"""Runs ONNX's own tests of single operators, which pip's `onnx` carries, through
the importer and the CPU kernels.

usage: tests/bench/onnx_node_tests.py TESSERA_ONNX_OUTPUTS [--verbose] [NAME…]

A test's inputs are data of the graph, or tensors of the file: weights, shapes,
numbers. Each test is tried with its first floating-point input as data and the
others as tensors, with each input of whole numbers, such as ids, as data, and
with all of them as tensors; it passes if one of these gives the expected
outputs. Prints how many tests of mapped operators pass, and
that none crashes. Exit status 1 where an output is wrong or a process dies.

    pip install onnx==1.16.2 numpy
"""

import argparse
import collections
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import onnx
from onnx import numpy_helper

RTOL, ATOL = 1e-3, 1e-5

# Element types to which values would be rounded: a graph has one type.
ROUNDED = {onnx.TensorProto.BFLOAT16, onnx.TensorProto.STRING,
           *range(onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.INT4 + 1)}

# What differs by design: a graph is one to train.
BY_DESIGN = {
    "test_batchnorm_epsilon": "statistics are those of the batch",
    "test_batchnorm_example": "statistics are those of the batch",
    "test_gather_negative_indices": "ids count from the front",
    "test_gather_elements_negative_indices": "ids count from the front",
    "test_scatter_elements_with_negative_indices": "ids count from the front",
    "test_onehot_negative_indices": "ids count from the front",
    "test_training_dropout": "draws are Tessera's own",
    "test_training_dropout_default": "draws are Tessera's own",
}


def lift(model, least=13):
    """The model at version 13 where its operators are the same there."""
    for opset in model.opset_import:
        if opset.domain not in ("", "ai.onnx") or opset.version >= least:
            continue
        for node in model.graph.node:
            try:
                schema = onnx.defs.get_schema(node.op_type, least, node.domain)
            except onnx.defs.SchemaError:
                return
            if schema.since_version > opset.version or schema.deprecated:
                return
        opset.version = least


def load_test(folder):
    """The model, its inputs and the outputs that are expected."""
    model = onnx.load(folder / "model.onnx")
    lift(model)
    data = folder / "test_data_set_0"

    def read(kind, infos):
        arrays = []
        for i, info in enumerate(infos):
            if not info.type.HasField("tensor_type"):
                return None
            tensor = onnx.TensorProto()
            tensor.ParseFromString((data / f"{kind}_{i}.pb").read_bytes())
            arrays.append(numpy_helper.to_array(tensor))
        return arrays

    given = [i for i in model.graph.input]
    return model, read("input", given), read("output", model.graph.output)


def with_tensors(model, inputs, kept):
    """The model with all inputs but `kept` as tensors of the file."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    infos = list(changed.graph.input)
    del changed.graph.input[:]
    for info, array in zip(infos, inputs):
        if info.name == kept:
            changed.graph.input.append(info)
        else:
            changed.graph.initializer.append(
                numpy_helper.from_array(array, info.name))
    return changed


def run(binary, model, arrays, work):
    """Outputs, or a refusal's text, or None where the process died."""
    path = work / "model.onnx"
    path.write_bytes(model.SerializeToString())
    for old in list(work.glob("*.in")) + list(work.glob("*.out")):
        old.unlink()
    for i, array in enumerate(arrays):
        kind = np.float32 if array.dtype.kind == "f" else np.int32
        (work / f"{i}.in").write_bytes(array.astype(kind).tobytes())
    try:
        done = subprocess.run([binary, path, work], capture_output=True,
                              text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 2:
        return done.stderr.strip()
    if done.returncode != 0:
        return None
    outputs = []
    for i, line in enumerate(done.stdout.split("\n")[:-1]):
        shape = [int(extent) for extent in line.split()]
        values = np.frombuffer((work / f"{i}.out").read_bytes(), np.float32)
        outputs.append(values.reshape(shape))
    return outputs


def agree(found, expected):
    if len(found) < 1 or len(found) > len(expected):
        return False
    for a, b in zip(found, expected):
        if b.dtype.kind not in "fiub" or a.shape != b.shape:
            return False
        if not np.allclose(a, b.astype(np.float32), RTOL, ATOL,
                           equal_nan=True):
            return False
    return True


def outcome(binary, folder, work):
    """"passed", "refused: why", "by design: why", "wrong" or "crashed"."""
    model, inputs, outputs = load_test(folder)
    if inputs is None or outputs is None:
        return "refused: sequences and optional values"
    if folder.name in BY_DESIGN:
        return "by design: " + BY_DESIGN[folder.name]
    types = {value.type.tensor_type.elem_type
             for value in [*model.graph.input, *model.graph.output]}
    if types & ROUNDED:
        return "by design: a graph has one type"
    names = [i.name for i in model.graph.input]
    floats = [n for n, a in zip(names, inputs)
              if a.dtype.kind == "f" and a.ndim > 0]
    whole = [n for n, a in zip(names, inputs)
             if a.dtype.kind in "iu" and a.ndim > 0]
    results = []
    for kept in floats[:1] + whole + [None]:
        try:
            changed = with_tensors(model, inputs, kept)
        except (TypeError, KeyError, ValueError) as error:
            return f"refused: {error}"
        arrays = [a for n, a in zip(names, inputs) if n == kept]
        found = run(binary, changed, arrays, work)
        if found is None:
            return "crashed"
        if isinstance(found, str):
            results.append("refused: " + found)
        elif agree(found, outputs):
            return "passed"
        else:
            results.append("wrong")
    return "wrong" if "wrong" in results else results[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--by-operator", action="store_true",
                        help="count tests that pass by Tessera's operators")
    args = parser.parse_args()
    binary = str(pathlib.Path(args.binary).resolve())
    mapped = set(subprocess.run([binary, "--operators"], check=True, text=True,
                                stdout=subprocess.PIPE).stdout.split())
    root = pathlib.Path(onnx.__file__).parent / "backend/test/data/node"
    by_op = collections.defaultdict(collections.Counter)
    others = collections.Counter()
    used = collections.Counter()
    with tempfile.TemporaryDirectory() as work:
        for folder in sorted(root.iterdir()):
            if args.names and folder.name not in args.names:
                continue
            nodes = onnx.load(folder / "model.onnx").graph.node
            ops = [n.op_type if n.domain in ("", "ai.onnx") else
                   n.domain + "." + n.op_type for n in nodes]
            result = outcome(binary, folder, pathlib.Path(work))
            kind = result.split(":")[0]
            if kind == "passed":
                ran = pathlib.Path(work) / "operators"
                used.update(set(ran.read_text().split()))
            # A function's expanded test is of many; its own name is in front.
            if set(ops) <= mapped:
                by_op[ops[-1]][kind] += 1
            else:
                others[kind] += 1
            if args.verbose or kind in ("wrong", "crashed"):
                print(f"{folder.name}: {result}")
    for op in sorted(by_op):
        counts = by_op[op]
        print(f"{op}: {counts['passed']} of {sum(counts.values())}" + "".join(
            f", {counts[k]} {k}"
            for k in ("refused", "by design", "wrong", "crashed")
            if counts[k]))
    for op, count in sorted(used.items() if args.by_operator else []):
        print(f"operator {op} in {count} tests that pass")
    total = sum(by_op.values(), collections.Counter())
    print(f"mapped operators: {total['passed']} of {sum(total.values())} "
          f"passed, {total['refused']} refused, {total['by design']} differ by "
          f"design, {total['wrong']} wrong, {total['crashed']} crashed")
    print(f"others: {others['refused'] + others['by design']} of "
          f"{sum(others.values())} refused, "
          f"{others['passed']} passed, {others['wrong']} wrong, "
          f"{others['crashed']} crashed")
    bad = total + others
    sys.exit(1 if bad["wrong"] or bad["crashed"] else 0)


if __name__ == "__main__":
    main()
