"""What a node of PyTorch's graph computes, where that is no constant.

A value is a tensor of Tessera's graph (Act), or what becomes one when something
reads it as a tensor: a slice, which a dense layer may make as a piece of its
own; scores, which are a part of attention; a mean of squares, which is a part
of a norm. Each kind is a class in the module of its subject.
"""

import dataclasses
import math

from .dimensions import extent, flatten, wide
from .functions import POINTS, bends_unseen, function_of
from .problems import Unmappable

UNKNOWN = object()  # of a node that could not be mapped


class Value:
    described = "no tensor"  # in messages
    # Where an elementwise node reads several kinds, that of the highest
    # precedence says what becomes of it.
    precedence = 0

    def act(self, walk):
        """As an Act; None where it is none."""
        return None

    def elementwise(self, walk, node, name, *operands, **keywords):
        """What an elementwise node makes that reads it; None: what it makes
        of tensors."""
        return None

    def view(self, walk, node, arguments):
        """What a view makes of it; None: what it makes of a tensor."""
        return None

    def piece(self, walk, node, dim, start, stop, dropped):
        """Elements [start, stop) along a dimension, which is `dropped` where
        it is one; None: those of a tensor."""
        return None


def is_constant(value):
    return not isinstance(value, Value)


@dataclasses.dataclass
class Act(Value):
    """A tensor of the graph as PyTorch sees it, and a function that is applied
    to each element: elementwise nodes are gathered until something else reads
    them, so that an operator is recognised however it is spelled."""
    precedence = -1  # the others may become tensors
    tensor: str
    own: list               # the tensor's atoms
    dims: list              # PyTorch's dimensions, each a list of atoms
    samples: object = None  # f(POINTS); None: x itself
    last: object = None     # the node that was gathered last
    # Of that node: its name, its operands, Acts and numbers, and what it makes
    # of such samples. Read where no operator computes the whole function.
    step: tuple = ()
    # Where the samples do not tell the function from others, what does.
    unseen: object = None
    # Where it is cut: the atom, and (start, stop, its atoms by those of the
    # whole, Act) of each piece.
    cut: object = None
    pieces: tuple = ()

    @property
    def shape(self):
        return [extent(dim) for dim in self.dims]

    @property
    def is_broadcast(self):
        """Whether its elements are others than the tensor's, each once."""
        atoms = lambda of: sorted(wide(of), key=lambda atom: atom.name)
        return atoms(flatten(self.dims)) != atoms(self.own)

    def viewed(self, dims):
        return dataclasses.replace(self, dims=dims)

    def act(self, walk):
        return self


def gathered(x, node, name, operands, compute):
    """x with the function that `compute` makes of `operands`: Acts, which are
    functions of its tensor, and numbers."""
    numbers = [v for v in operands if not isinstance(v, Act)]
    acts = [v for v in operands if isinstance(v, Act)]
    given = [v.samples if v.samples is not None else POINTS for v in acts]
    samples = iter(given)
    made = compute(*(next(samples).clone() if isinstance(v, Act) else v
                     for v in operands))
    unseen = None
    if any(v.unseen for v in acts) or bends_unseen(name, numbers, given):
        unseen = hash((name, *(
            (of.numpy().tobytes(), v.unseen) for v, of in zip(acts, given)),
            *numbers)) or 1
    return dataclasses.replace(x, samples=made, last=node, unseen=unseen,
                               step=(name, tuple(operands), compute))


def negated(x, node):
    return gathered(x, node, "neg", [x], lambda samples: -samples)


def clipped(x, node, least=-math.inf, most=math.inf):
    return gathered(x, node, "clip", [x, least, most],
                    lambda samples, *bounds: samples.clamp(*bounds))


def recognised(x):
    """The operator that computes what is gathered, and its attributes."""
    if x.unseen:
        raise Unmappable("no operator computes this function of one tensor")
    return function_of(x.samples)
