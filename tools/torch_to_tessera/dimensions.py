"""Dimensions: PyTorch's are made of atoms, which are Tessera's."""

import dataclasses
import math

from .problems import Unmappable


@dataclasses.dataclass(frozen=True)
class Atom:
    """A dimension of a tensor of Tessera's. One of PyTorch's may be several of
    them, such as (heads, features), or none where its extent is 1."""
    name: str
    extent: int
    letter: str  # in rules, where it is free there


class Atoms:
    """Which atoms a later reshape takes apart, or a later slice cuts into
    tensors of their own: they are made in parts when the graph is walked
    again."""

    def __init__(self):
        self.splits, self.cuts, self.changed = {}, {}, False
        self.uncut = set()   # of which something reads the whole
        self.paired = set()  # whose neighbours a rotary embedding turns
        # Parameters that are read in several forms: as tensors that all views
        # are made of.
        self.whole = set()
        self.constants = {}  # what they are called, by their numbers

    def make(self, name, extent, letter):
        if name not in self.splits:
            return [Atom(name, extent, letter)]
        outer = self.splits[name]
        return (self.make(name + ".0", outer, letter) +
                self.make(name + ".1", extent // outer, letter))

    def split(self, atom, outer):
        """The atom as (outer, the rest)."""
        if atom.name not in self.splits:
            self.splits[atom.name], self.changed = outer, True
        return self.make(atom.name, atom.extent, atom.letter)

    def pair(self, name):
        self.changed |= name not in self.paired
        self.paired.add(name)

    def in_halves(self, atoms):
        """What a layer makes instead of `atoms`, (pairs, 2) of features whose
        neighbours are turned: one dimension with the first of each pair in
        front of all second ones. And the order of the features of each."""
        made = []
        for atom in atoms:
            name = atom.name[:-2]
            if made and name in self.paired and atom.name == name + ".1" and (
                    made[-1][0].name == name + ".0"):
                pairs = made.pop()[0].extent
                made.append((Atom(name + "~", 2 * pairs, atom.letter),
                             [*range(0, 2 * pairs, 2),
                              *range(1, 2 * pairs, 2)]))
            else:
                made.append((atom, None))
        return made

    def cut(self, atom, start, stop):
        """Whether the piece is new."""
        places = self.cuts.setdefault(atom.name, {0, atom.extent})
        new = not {start, stop} <= places
        places |= {start, stop}
        self.changed |= new
        return new

    def leave_whole(self, atom):
        self.changed |= atom.name not in self.uncut
        self.uncut.add(atom.name)
        self.cuts.pop(atom.name, None)

    def pieces(self, atom):
        places = sorted(self.cuts[atom.name])
        return list(zip(places, places[1:]))


def extent(dim):
    return math.prod(atom.extent for atom in dim)


def flatten(dims):
    return [atom for dim in dims for atom in dim]


def wide(dim):
    return [atom for atom in dim if atom.extent > 1]


def paired(dim, other):
    """The atoms of both, those of 1 only where both have them."""
    if [a.extent for a in dim] != [a.extent for a in other]:
        return wide(dim), wide(other)
    return dim, other


def is_same(atoms, others):
    return ([a for a in atoms if a.extent > 1] ==
            [a for a in others if a.extent > 1])


class Letters:
    """The letters of atoms in one rule: each atom's own where it is free.
    `of`: letters that atoms have; `reserved`: those that none may have."""

    def __init__(self, of=(), reserved=""):
        self.of = {**dict(of), **dict(zip(reserved, reserved))}

    def __call__(self, atoms):
        for atom in atoms:
            if atom in self.of:
                continue
            free = (c for c in atom.letter + "fogdijkmnpqruvcazehw"
                    if c not in self.of.values())
            self.of[atom] = next(free, None)
            if self.of[atom] is None:
                raise Unmappable("a tensor of more dimensions than a rule has "
                                 "letters")
        return "".join(self.of[atom] for atom in atoms)


def letters_of(atoms):
    """Of an elementwise rule. What a block reads has the letters of lookups,
    norms and sums alike, so that the first of equal blocks is like the
    others."""
    letters = [atom.letter for atom in atoms]
    return "bsh" if letters == ["b", "s", "f"] else Letters()(atoms)
