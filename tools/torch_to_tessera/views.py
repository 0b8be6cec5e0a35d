"""Views: other dimensions of the same elements."""

from .dimensions import Atom, extent, flatten
from .layout import windows_apart, windows_joined
from .nodes import shape_of
from .parameters import expanded
from .problems import Unmappable
from .values import Act, Value


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


def reshape(walk, node, x, *arguments, **keywords):
    if isinstance(x, Act):
        x = windows_apart(walk, node, x, shape_of(node))
    y = viewing(reshaped)(walk, node, x, *arguments, **keywords)
    if isinstance(y, Act) and not walk.atoms.changed:
        y = windows_joined(walk, node, y)
    return y


def reshaped(walk, node, x, *_):
    """Atoms are dealt out from the front; one that is too large for what is
    left of a dimension is taken apart."""
    shape = shape_of(node)
    atoms, dims, own = flatten(x.dims), [], list(x.own)

    def misfit():
        raise Unmappable(f"cannot make {shape} of {x.shape} without moving "
                         "elements")

    def next_of(rest):
        """An atom whose extent divides `rest`."""
        if not atoms:
            misfit()
        atom = atoms.pop(0)
        if rest % atom.extent == 0:
            return atom
        if atom.extent % rest:
            misfit()
        parts = walk.atoms.split(atom, rest)
        if parts[0].extent != rest:
            misfit()
        atoms[:0] = parts[1:]
        if atom in own:
            at = own.index(atom)
            own[at:at + 1] = parts
        return parts[0]

    for size in shape:
        dim, rest = [], size
        if size == 1 and atoms and atoms[0].extent == 1:
            dim.append(atoms.pop(0))
        while rest > 1:
            dim.append(next_of(rest))
            rest //= dim[-1].extent
        # Heads that are split into (heads, 1) stay one dimension.
        while (dim and atoms and atoms[0].extent == 1 and
               atoms[0].letter == dim[-1].letter):
            dim.append(atoms.pop(0))
        dims.append(dim)
    if not dims and atoms or extent(atoms) > 1:
        misfit()
    if atoms:
        dims[-1] += atoms
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


def expand(walk, node, x, sizes, **_):
    return expanded(walk, node.name, x, sizes)


def repeated(walk, node, x, times, dim=None, **_):
    dims = list(x.dims)
    if not isinstance(times, int) or dim is None:
        raise Unmappable("repeats other than of a whole dimension")
    dims[dim] = dims[dim] + [Atom(f"{node.name}.r", times, "r")]
    return dims
