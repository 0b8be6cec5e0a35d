"""PyTorch's graph of a module, by torch.export or torch.fx."""

import contextlib
import functools
import sys

import torch

from .aliases import Aliases, join_written_parts, writes_in_place
from .nodes import numbers_of
from .parameters import Param
from .problems import refuse


def first_line(error):
    return next(iter(str(error).strip().splitlines()), repr(error))


def in_no_grad(graph):
    """The nodes that torch.fx has met while gradients were off."""
    enabled, nodes = True, set()
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = node.args[0]
        elif not enabled:
            nodes.add(node)
    return nodes


class Traced:
    """PyTorch's graph of a module: its nodes in front of one output."""

    def __init__(self, module, inputs, args, name):
        self.module, self.name = module, name
        tensors = inputs.values() if isinstance(inputs, dict) else inputs
        self.batch = next(iter(tensors)).shape[0]  # that it is traced with
        self.leaves = {path for path, part in module.named_modules()
                       if not list(part.children())}
        first = {}  # tied parameters have the first one's name
        for path, parameter in module.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), path)
        self.parameters = {
            path: first[id(parameter)] for path, parameter in
            module.named_parameters(remove_duplicate=False)}
        self.buffers = {}  # names, by their numbers
        for path, buffer in module.named_buffers():
            if not (buffer.is_meta or buffer.is_complex()):
                self.buffers.setdefault(numbers_of(buffer)[1], path)
        self.buffer_of = {}  # paths, by placeholder
        graph, placeholders = self.trace(inputs, args.fx)
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
        join_written_parts(graph)
        self.without_gradients = in_no_grad(graph)
        self.aliases = Aliases(graph, self.output)
        self.nodes = self.aliases.nodes
        self.decomposed = {}  # nodes as graphs: decompositions.py

    def constants(self):
        """By placeholder: parameters and buffers; buffers that each walk may
        write into."""
        writes = any(map(writes_in_place, self.nodes))
        return {node: value.clone() if writes and isinstance(
            value, torch.Tensor) else value
            for node, value in self.values.items()}

    def trace(self, inputs, by_fx):
        try:
            if not by_fx:
                return self.export(inputs)
        except Exception as error:  # of any kind, says its documentation
            print(f"torch.export: {first_line(error)}; tracing by torch.fx "
                  "instead", file=sys.stderr)
        try:
            return self.make_fx(inputs)
        except Exception as error:
            refuse(f"{self.name}: torch.fx: {first_line(error)}: the module "
                   "cannot be traced, such as one that chooses its way by what "
                   "tensors hold")

    def export(self, inputs):
        positional = tuple(inputs) if isinstance(inputs, tuple) else ()
        by_name = {} if positional else inputs
        with torch.enable_grad(), masks_as_given():
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
                if spec.kind == kinds.BUFFER:
                    self.buffer_of[node] = spec.target
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
            if path not in self.parameters:
                self.buffer_of[node] = path
        for i, node in enumerate(nodes[len(state):]):
            placeholders[node] = "input", (names[i] or f"input_{i}",
                                           tensors[i])
        return traced.graph, placeholders

    def attribute(self, node):
        value = node.graph.owning_module
        for part in node.target.split("."):
            value = getattr(value, part)
        return value.clone() if isinstance(value, torch.Tensor) else value

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
