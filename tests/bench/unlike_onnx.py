#!/usr/bin/env python3
"""Writes a chain of dense layers of unlike widths as an ONNX file without
weights: what a search makes of thousands of operators of which hardly two are
alike (docs/search.md). Needs pip's `onnx`.

    unlike_onnx.py 5000 unlike.onnx
    tessera search --model unlike.onnx --global-batch 1024 \\
        --cluster dgx-a100-80gb:4 --time-limit 30
"""

import random
import sys

import onnx
from onnx import TensorProto, helper


def weight(name, rows, columns):
    """A tensor whose values lie in a file that planning does not read."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT,
                         dims=[rows, columns],
                         data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights.bin")
    return tensor


def main():
    layers, path = int(sys.argv[1]), sys.argv[2]
    random.seed(1)
    widths = [random.randrange(64, 1024) * 8 for _ in range(layers + 1)]
    nodes, weights, last = [], [], "x"
    for i in range(layers):
        weights.append(weight(f"w{i}", widths[i], widths[i + 1]))
        nodes.append(helper.make_node("MatMul", [last, f"w{i}"], [f"h{i}"],
                                      name=f"mm{i}"))
        nodes.append(helper.make_node("Relu", [f"h{i}"], [f"r{i}"],
                                      name=f"relu{i}"))
        last = f"r{i}"

    def value(name, width):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT,
                                             ["batch", width])

    graph = helper.make_graph(nodes, "unlike", [value("x", widths[0])],
                              [value(last, widths[-1])], weights)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)])
    with open(path, "wb") as file:
        file.write(model.SerializeToString())


if __name__ == "__main__":
    main()
