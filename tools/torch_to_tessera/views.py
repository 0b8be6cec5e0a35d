"""Views: other dimensions of the same elements."""

from .dimensions import TRACED_BATCH, Atom, extent, flatten
from .nodes import shape_of
from .problems import Unmappable
from .values import Value


def viewing(handler):
    """A handler of views, which makes an Act's dimensions: of parameters views
    are kept, of other values made at once."""
    def view(walk, node, x, *arguments, **keywords):
        if isinstance(x, Value):
            made = x.view(walk, node, arguments)
            if made is not None:
                return made
        x = walk.act(x)
        return x.viewed(handler(walk, node, x, *arguments, **keywords))
    return view


def reshaped(walk, node, x, *_):
    shape = shape_of(node)
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


def turned(walk, node, x):
    return x.dims[::-1]


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
