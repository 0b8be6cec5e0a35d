"""What a node of PyTorch's graph computes, where that is no constant.

A value is a tensor of Tessera's graph (Act), or what becomes one when something
reads it as a tensor: a slice, which a dense layer may make as a piece of its
own; scores, which are a part of attention; a mean of squares, which is a part
of a norm. Each kind is a class in the module of its subject.
"""

import dataclasses

from .dimensions import extent, flatten, wide

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
    # Of that node: its name, and its operands, Acts and numbers. Read where no
    # operator computes the whole function.
    step: tuple = ()
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
