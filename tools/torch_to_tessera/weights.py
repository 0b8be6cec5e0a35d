"""A module's parameters as Tessera's weights."""

import json
import struct

import torch

# Operators that are no methods of tensors.
VIEWS = {"_unsafe_view": "reshape", "view": "reshape"}


def weights_of(graph, walk, module):
    """The module's parameters, and batch norms' running averages, as Tessera's
    weights, by name."""
    parameters = {**dict(module.named_buffers(remove_duplicate=False)),
                  **dict(module.named_parameters(remove_duplicate=False))}
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


def write_safetensors(path, tensors):
    header, end = {}, 0
    for name, tensor in tensors.items():
        size = tensor.element_size() * tensor.numel()
        header[name] = {"dtype": f"F{8 * tensor.element_size()}",
                        "shape": list(tensor.shape),
                        "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.numpy().tobytes())
