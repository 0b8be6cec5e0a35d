"""Parameters: views and pieces of them are kept until a layer reads them."""

import dataclasses
import math

from .dimensions import Atom, Letters, extent, flatten, letters_of
from .functions import number_of
from .layout import in_order
from .nodes import operator_name, shape_of
from .problems import Unmappable
from .values import Act, Value, is_constant


@dataclasses.dataclass
class Param(Value):
    """A parameter, and the views of it: (operator, arguments behind self)."""
    described = "a parameter"
    precedence = 3
    name: str
    shape: list
    views: tuple = ()
    part: str = ""  # of a slice of it, "/0:16"
    # The Param before its last view, where that repeats elements.
    once: object = None

    @property
    def label(self):
        return self.name + self.part

    def act(self, walk):
        if self.once is not None:
            x = self.once.act(walk)
            return x.viewed(expanded(walk, self.label, x, self.shape))
        return walk.once(("read", self.label, repr(self.views)),
                         lambda: read(walk, self))

    def view(self, walk, node, arguments):
        name = operator_name(node)
        if name in ("repeat", "repeat_interleave"):
            return None
        shape = shape_of(node)
        repeats = math.prod(shape) > math.prod(self.shape)
        if self.once is not None and not repeats:
            return None
        return Param(self.name, shape,
                     self.views + ((name, tuple(arguments)),), self.part,
                     self if repeats else None)

    def piece(self, walk, node, dim, start, stop, dropped):
        """A weight of its own."""
        shape = [stop - start if d == dim else size
                 for d, size in enumerate(self.shape)
                 if d != dim or not dropped]
        views = (("narrow", (dim, start, stop - start)),)
        if dropped:
            views += (("squeeze", (dim,)),)
        whole = (start, stop) == (0, self.shape[dim])
        return Param(self.name, shape, self.views + views,
                     self.part + ("" if whole else f"/{start}"))

    def elementwise(self, walk, node, name, *operands, **keywords):
        """A row for each place that is added to a sequence; 1 + a scale."""
        other = next((v for v in operands if v is not self), None)
        if name != "add" or keywords:
            return None
        if is_constant(other) and number_of(other) is not None:
            return dataclasses.replace(
                self, views=self.views + (("add", (number_of(other),)),))
        other = None if is_constant(other) else other.act(walk)
        if isinstance(other, Act) and len(other.dims) == 3:
            return rows_added(walk, node, self, other)
        return None


def expanded(walk, name, x, sizes):
    """The dimensions of x where those of 1 are repeated: new ones are atoms
    that the tensor lacks, such as the batch."""
    dims = [[]] * (len(sizes) - len(x.dims)) + x.dims
    result = []
    for d, (dim, size) in enumerate(zip(dims, sizes)):
        if size in (-1, extent(dim)):
            result.append(dim)
        elif d == 0 and size == walk.batch.extent:
            result.append([walk.batch])
        else:
            result.append([Atom(f"{name}.{d}", size, "r")])
    return result


def rows_added(walk, node, param, x):
    """A row for each place of a sequence; None where it is something else."""
    s, h = x.dims[1:]
    rows = [n for n in param.shape if n != 1]
    if len(s) != 1 or s[0] not in walk.places or rows != [
            s[0].extent, extent(h)]:
        return None
    x = in_order(walk, x)
    row = walk.lookup(
        node, param, *rows, (param, ()),
        walk.extra(walk.places[s[0]], [walk.batch, s[0]]),
        param.name.rpartition(".")[2])
    letters = letters_of(x.own)
    y = walk.add("add", node, [x.tensor, row],
                 f"{letters},{letters}->{letters}")[0]
    return dataclasses.replace(x, tensor=y)


def read(walk, param):
    """A parameter that is no matrix of a layer, as a tensor."""
    dims = [walk.atoms.make(f"{param.label}.{d}", size, "f")
            if size > 1 else [] for d, size in enumerate(param.shape)]
    own = flatten(dims)
    is_matrix = len(list(filter(None, dims))) > 1
    weight = walk.graph.weight(
        param.label, [a.extent for a in own], (param, ()),
        stddev=walk.stddev(0.02) if is_matrix else 0, constant=1)
    letters = Letters()(own)
    # A node of its own has the gradient, whatever reads the parameter.
    path = param.name.rpartition(".")[0]
    y = walk.graph.add("scale", f"{param.label}/read", path, [weight],
                       f"{letters}->{letters}", factor=1)[0]
    return Act(y, own, dims)


def vector(walk, param, shape, constant=0):
    """A parameter of one dimension, as a weight of `shape`; where there is
    none, numbers that are all `constant`."""
    if param is None:
        name = "ones" if constant else "zeros"
        return walk.graph.constant(
            f"{name}.{'.'.join(map(str, shape))}", shape,
            [constant] * math.prod(shape))
    if not isinstance(param, Param):
        what = param.described if isinstance(param, Value) else "a constant"
        raise Unmappable(f"expected a parameter, found {what}")
    if param.shape != [math.prod(shape)]:
        raise Unmappable(f"parameter '{param.name}' has {param.shape}: "
                         f"expected {math.prod(shape)} numbers")
    return walk.graph.weight(param.label, shape,
                             (param, (slice(0, param.shape[0]),)),
                             constant=constant)
