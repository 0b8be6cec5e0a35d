"""Operators that the table lacks, by others: as written here, or as PyTorch
itself takes them apart."""

import math

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import softplus

from .aliases import writes_in_place
from .nodes import operator_name
from .problems import Unmappable


def elu(x, alpha=1, scale=1, input_scale=1):
    below = torch.exp(torch.clamp(x, max=0) * input_scale) - 1
    return scale * (torch.relu(x) + alpha * below)


def glu(x, dim=-1):
    values, gates = torch.chunk(x, 2, dim)
    return values * torch.sigmoid(gates)


def logsumexp(x, dims, keep=False):
    most = torch.amax(x, dims, keepdim=True)
    y = torch.log(torch.sum(torch.exp(x - most), dims, keepdim=True)) + most
    return y if keep else torch.squeeze(y, dims)


def least(x, dims=(), keepdim=False):
    return -torch.amax(-x, dims, keepdim)


def best(of_one, of_two):
    """max or min: of all, of a dimension (its places are not known), of two."""
    def found(x, dim=None, keepdim=False):
        if isinstance(dim, torch.Tensor):
            return of_two(x, dim)
        if dim is None:
            return of_one(x)
        return [of_one(x, dim, keepdim), None]
    return found


def maxima_of_windows(x, size):
    """Of windows of several sizes, direction by direction: window i of o is
    [floor(i n / o), ceil((i + 1) n / o)). Their places are not known."""
    directions = x.dim() - 2
    size = [size] * directions if isinstance(size, int) else size
    for dim, o in enumerate(size, 2):
        n = x.shape[dim]
        if o in (None, n):
            continue
        x = torch.cat([torch.amax(
            x.narrow(dim, i * n // o, -(-(i + 1) * n // o) - i * n // o), dim,
            True) for i in range(o)], dim)
    return [x, None]


def channel_shuffle(x, groups):
    parts = x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    return torch.transpose(parts, 1, 2).reshape(x.shape)


def vector_norm(x, order=2, dims=None, keep=False, **_):
    if order == 1:
        return torch.sum(torch.abs(x), dims, keepdim=keep)
    if order != 2:
        raise Unmappable(f"a norm of order {order}")
    return torch.sqrt(torch.sum(x * x, dims, keepdim=keep))


def variance(x, dims=None, unbiased=True, keepdim=False, *, correction=None):
    dims = dims or list(range(x.dim()))
    less = int(unbiased) if correction is None else correction
    count = math.prod(x.shape[d] for d in dims)
    centred = x - torch.mean(x, dims, keepdim=True)
    return torch.sum(centred * centred, dims, keepdim=keepdim) / (count - less)


def deviation(*arguments, **keywords):
    return torch.sqrt(variance(*arguments, **keywords))


RECIPES = {
    "adaptive_max_pool1d": maxima_of_windows,
    "adaptive_max_pool2d": maxima_of_windows,
    "amin": least,
    "channel_shuffle": channel_shuffle,
    "celu": lambda x, alpha=1: elu(x, alpha, 1, 1 / alpha),
    "elu": elu,
    "expm1": lambda x: torch.exp(x) - 1,
    "expand_as": lambda x, y: x.expand(y.shape),
    "glu": glu,
    "lerp": lambda x, y, weight: x + weight * (y - x),
    "linalg_vector_norm": vector_norm,
    "log1p": lambda x: torch.log(x + 1),
    "log_sigmoid": lambda x: -softplus(-x),
    "logsumexp": logsumexp,
    "max": best(torch.amax, torch.maximum),
    "min": best(least, torch.minimum),
    "mish": lambda x: x * torch.tanh(softplus(x)),
    "selu": lambda x: elu(x, 1.6732632423543772, 1.0507009873554805),
    "std": deviation,
    "var": variance,
}


def recipe_of(node):
    return RECIPES.get(operator_name(node).removesuffix("_"))


def decomposed(node):
    """A graph that computes what a node does of its operands that are nodes,
    in order; None where PyTorch has none."""
    leaves, spec = torch.utils._pytree.tree_flatten((node.args, node.kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, torch.fx.Node)]
    examples = [operand.meta.get("val") for operand in operands]
    if not all(isinstance(value, torch.Tensor) for value in examples):
        return None
    compute = recipe_of(node) or torch._decomp.decomposition_table.get(
        node.target, node.target)

    def call(*tensors):
        given = iter(tensors)
        args, keywords = torch.utils._pytree.tree_unflatten(
            [next(given) if isinstance(leaf, torch.fx.Node) else leaf
             for leaf in leaves], spec)
        return compute(*args, **keywords)

    with torch._subclasses.FakeTensorMode(), torch.no_grad():
        tensors = [torch.empty(value.shape, dtype=value.dtype)
                   for value in examples]
        try:
            graph = make_fx(torch.func.functionalize(call))(*tensors).graph
        except Exception:  # whatever the operator's own code raises
            return None
    if any(inner.target == node.target for inner in graph.nodes):
        return None
    for inner in graph.nodes:
        inner.name = f"{node.name}.{inner.name}"  # atoms are called by them
        for key in ("nn_module_stack", "stack_trace"):
            inner.meta[key] = node.meta.get(key)
    return graph, operands


def by_others(walk, node):
    """What a node makes that the table lacks."""
    if node not in walk.traced.decomposed:
        walk.traced.decomposed[node] = decomposed(node)
    if walk.traced.decomposed[node] is None:
        raise Unmappable("no operator of Tessera's is known for "
                         f"{operator_name(node)}")
    graph, operands = walk.traced.decomposed[node]
    try:
        return inlined(walk, graph, map(walk.of, operands))
    except Unmappable:
        if recipe_of(node):
            raise
        # PyTorch's own parts would tell a user nothing.
        raise Unmappable("no operator of Tessera's is known for "
                         f"{operator_name(node)}") from None


def inlined(walk, graph, arguments):
    """What a graph within the graph makes."""
    arguments = iter(arguments)
    for inner in graph.nodes:
        if inner.op == "placeholder":
            walk.values[inner] = next(arguments)
        elif inner.op == "output":
            return walk.of(inner.args[0])
        elif writes_in_place(inner):
            raise Unmappable("writes in place in a graph of its own")
        else:
            walk.values[inner] = walk.map(inner)
