"""What a node of PyTorch's graph says of itself."""

import hashlib
import math
import os
import re

import torch

from .problems import Unmappable

MOST_ELEMENTS = 1 << 31   # of a constant


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


def numbers_of(constant):
    """A constant's numbers, and what tells it from others."""
    numbers = constant.detach().double().contiguous()
    return numbers, (tuple(numbers.shape),
                     hashlib.sha1(numbers.numpy()).digest())


def source_line(node):
    """The line of the model's own code, outside of PyTorch."""
    lines = re.findall(r'File "([^"]+)", line (\d+)',
                       node.meta.get("stack_trace") or "")
    own = [line for line in lines
           if os.path.dirname(torch.__file__) not in line[0]] or lines
    return f"{own[-1][0]}:{own[-1][1]}" if own else "?"


def shape_of(node):
    """Of what it makes."""
    return list(node.meta["val"].shape)


def fold(node, operands, keywords):
    """A node of constants, computed."""
    target = node.target
    tags = getattr(target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        raise Unmappable("draws random numbers")
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.numel() > MOST_ELEMENTS:
        raise Unmappable(f"a constant of {value.numel()} elements, which is "
                         "not computed")
    if operator_name(node) == "_assert_tensor_metadata":
        return None
    if "device" in keywords:
        keywords = {**keywords, "device": "cpu"}
    with torch.no_grad():
        result = target(*operands, **keywords)
    if operator_name(node).startswith(("empty", "new_empty")) and (
            result.is_floating_point()):
        result.fill_(math.nan)  # which no graph may have
    if isinstance(result, torch.Tensor) and result.is_meta:
        raise Unmappable("a constant without a value: build the module's "
                         "buffers on the CPU")
    return result
