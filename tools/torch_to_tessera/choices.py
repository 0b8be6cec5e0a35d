"""The largest elements along a dimension, and what is read and written by
their places."""

from .dimensions import Letters, extent
from .elementwise import binary
from .layout import compact
from .problems import Unmappable
from .values import Act


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
