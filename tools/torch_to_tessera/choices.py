"""The largest elements along a dimension, and what is read and written by
their places; places in another order."""

import torch

from .dimensions import Atom, Letters, extent
from .elementwise import binary
from .functions import number_of
from .layout import apart, compact, one_atom
from .nodes import shape_of
from .places import concatenated, piece, sliced_off
from .problems import Unmappable
from .products import product
from .values import Act, is_constant


def chosen_places(walk, node, x, k, dim, largest):
    """The largest elements along a dimension, and their places."""
    # Without a router's one feature, which those do not have that are read by
    # its choices.
    x = walk.tensor(x)
    dim %= len(x.dims)
    x = compact(walk, node, x.viewed([
        d if i in (0, dim) or extent(d) > 1 else []
        for i, d in enumerate(x.dims)]))
    if len(x.dims[dim]) != 1 or x.dims[dim][0].letter == "b":
        raise Unmappable("the largest of a dimension that is several, or of "
                         "samples")
    [v] = x.dims[dim]
    letters = Letters(reserved="vk")
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


def one_hot(walk, node, ids, count=-1):
    ids = walk.tensor(ids)
    if count < 0 or walk.graph.tensors[ids.tensor]["dtype"] != "int32":
        raise Unmappable("expected ids, and how many there are")
    v = Atom(f"{node.name}.v", count, "f")
    letters = Letters({v: "v"})
    rule = letters(ids.own)
    y = walk.add("one_hot", node, [ids.tensor], f"{rule}->{rule}v",
                 sizes={"v": count}, first=0, places=count)[0]
    return Act(y, [*ids.own, v], [*ids.dims, [v]])


def by_places(walk, node, op, x, dim, ids):
    """The dimensions of ids, of which those that a tensor lacks are repeated
    for it, and those of x, whose others have the same extents."""
    x, ids = compact(walk, node, x), walk.tensor(ids)
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
    letters = Letters({v: "v"})
    y = walk.add("gather", node, [x.tensor, ids.tensor],
                 f"{letters(x.own)},{letters(ids.own)}->{letters(own)}")[0]
    return Act(y, own, [read if i == dim else d for i, d in enumerate(x.dims)])


def scatter_add(walk, node, x, dim, ids, source):
    """x, with what `source` has added at the places."""
    x = compact(walk, node, x)
    source, ids, dim = by_places(walk, node, "scatter_add", source, dim, ids)
    [k] = source.dims[dim]
    [v] = x.dims[dim]
    own = [v if a == k else a for a in source.own]
    letters = Letters({v: "v"})
    y = walk.add("scatter_add", node, [source.tensor, ids.tensor],
                 f"{letters(source.own)},{letters(ids.own)}->{letters(own)}",
                 sizes={"v": v.extent}, places=v.extent, suffix="put")[0]
    return binary(walk, node, "add", [x, Act(y, own, [
        [v] if i == dim else d for i, d in enumerate(source.dims)])])


def scatter(walk, node, x, dim, ids, source, reduce=None):
    """Zeros, with what is put at places of their own each."""
    ids = walk.tensor(ids)
    made = walk.graph.nodes.get(ids.tensor.partition(":")[0], {}).get("op")
    if reduce is not None or made != "top_k" or is_constant(source) or (
            not isinstance(x, torch.Tensor) or number_of(x) != 0):
        raise Unmappable("expected zeros, the places of the largest elements, "
                         "and what is put there")
    source, ids, dim = by_places(walk, node, "scatter", walk.act(source), dim,
                                 ids)
    [k] = source.dims[dim]
    v = Atom(f"{node.name}.v", shape_of(node)[dim], "f")
    own = [v if a == k else a for a in source.own]
    letters = Letters({v: "v"})
    y = walk.add("scatter_add", node, [source.tensor, ids.tensor],
                 f"{letters(source.own)},{letters(ids.own)}->{letters(own)}",
                 sizes={"v": v.extent}, places=v.extent, suffix="put")[0]
    return Act(y, own, [[v] if i == dim else d
                        for i, d in enumerate(source.dims)])


# ---- places that are constants

def at_places(walk, node, x, dim, ids):
    """The elements of a dimension at places that are known; several dimensions
    of these take its stead."""
    size = shape_of(node.args[0])[dim]
    places = [i % size for i in ids.flatten().tolist()]
    first, count = places[0] if places else 0, len(places)
    step = places[1] - first if count > 1 else 1
    run = places == [first + step * i for i in range(count)]
    if run and step == 1 and ids.dim() == 1:
        return piece(walk, node, x, dim, first, first + count)
    x = one_atom(walk, node, walk.tensor(x), dim)
    [v] = x.dims[dim]
    if v.letter == "b" or v not in x.own or not places:
        raise Unmappable("some of the samples, or of what is broadcast")
    if run and step:
        y = sliced_off(walk, node, x, dim, first, count, step)
    else:
        numbers = walk.known(torch.tensor(places), "int32")
        k = Atom(f"{node.name}.k", len(places), v.letter)
        own = [k if a == v else a for a in x.own]
        letters = Letters({v: "v"})
        y = Act(walk.add(
            "gather", node, [x.tensor, numbers.tensor],
            f"{letters(x.own)},{letters([k])}->{letters(own)}")[0], own,
            [[k] if i == dim else d for i, d in enumerate(x.dims)])
    if ids.dim() == 1:
        return apart(walk, node, y, dim)
    [k] = one_atom(walk, node, y, dim).dims[dim]
    parts = [walk.atoms.make(f"{node.name}.k{i}", size, v.letter)
             if size > 1 else [] for i, size in enumerate(ids.shape)]
    y = apart(walk, node, y, dim, [a for part in parts for a in part])
    return y.viewed([*y.dims[:dim], *parts, *y.dims[dim + 1:]])


def indexed(walk, node, x, ids):
    """x[:, ids], ids of one dimension that are constants."""
    given = [d for d, i in enumerate(ids) if i is not None]
    if len(given) != 1 or not isinstance(ids[given[0]], torch.Tensor) or (
            ids[given[0]].dtype == torch.bool):
        raise Unmappable("elements by ids that are computed, or of several "
                         "dimensions")
    return at_places(walk, node, x, given[0], ids[given[0]])


def index_select(walk, node, x, dim, ids):
    return indexed(walk, node, x, [None] * (dim % len(shape_of(node))) + [ids])


def rolled(walk, node, x, shifts, dims=()):
    x = walk.act(x)
    if not dims:
        raise Unmappable("rolls what is flattened")
    for dim, shift in zip(dims, shifts):
        dim %= len(x.dims)
        size = x.shape[dim]
        front = shift % size
        if front:
            x = concatenated(walk, node, [
                sliced_off(walk, node, x, dim, size - front, front),
                sliced_off(walk, node, x, dim, 0, size - front)], dim)
    return x


def flipped(walk, node, x, dims):
    x = walk.act(x)
    for dim in dims:
        dim %= len(x.dims)
        size = x.shape[dim]
        if size > 1:
            x = sliced_off(walk, node, x, dim, size - 1, size, -1)
    return x


def sums_so_far(walk, node, x, dim, **_):
    """A product with a matrix of ones above its diagonal."""
    x = walk.tensor(x)
    dim %= len(x.dims)
    order = [d for d in range(len(x.dims)) if d != dim] + [dim]
    ones = torch.ones(x.shape[dim], x.shape[dim]).triu()
    y = product(walk, node, x.viewed([x.dims[d] for d in order]),
                walk.known(ones))
    return y.viewed([y.dims[order.index(d)] for d in range(len(order))])


def sorted_places(walk, node, x, dim=-1, descending=False, **_):
    size = walk.act(x).shape[dim]
    return chosen_places(walk, node, x, size, dim, descending)
