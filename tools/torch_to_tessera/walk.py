"""A walk over PyTorch's graph, which makes Tessera's."""

import contextlib
import dataclasses
import math
import operator

import torch

from .decompositions import by_others
from .dimensions import flatten, letters_of
from .aliases import writes_in_place
from .functions import by_steps
from .graph import Graph
from .nodes import fold, module_path, numbers_of, operator_name
from .parameters import Param
from .problems import Unmappable
from .values import UNKNOWN, Act, Value, is_constant, recognised


class Walk:
    """One walk over the nodes. Where it takes an atom apart its graph is of no
    use, and another walk follows."""

    def __init__(self, traced, args, atoms, operators, stands_in=False):
        """`operators`: by name, what maps a node. `stands_in`: nodes behind
        others that cannot be mapped are looked at, too, by tensors of the
        shapes that these make. Such a walk is of no use but for its
        problems."""
        self.traced, self.args, self.atoms = traced, args, atoms
        self.operators = operators
        self.stands_in = stands_in
        self.graph = Graph(args, traced.name)
        self.values, self.problems, self.warnings = {}, [], {}
        self.read_whole = []  # atoms of which pieces are read, too
        self.made = {}  # what is made once, by what it is made of
        self.joined = {}  # atoms of windows -> those that they were made of
        # What nodes make that could not be mapped, and what is behind these.
        self.doubtful = set()
        self.of_layers = set()  # names of dense layers' nodes
        self.batch = self.atoms.make("batch", traced.batch, "b")[0]
        self.places = {}  # atom of a sequence -> its input of positions
        self.config = getattr(traced.module, "config", None)
        self.values.update(traced.constants())
        for placeholder, name, tensor in traced.inputs:
            self.values[placeholder] = self.input(name, tensor)
        self.values.update({
            node: value.act(self) for node, value in self.values.items()
            if isinstance(value, Param) and value.name in atoms.whole})

    def input(self, name, tensor):
        """An input of the model, (batch, …)."""
        shape = list(tensor.shape)
        if not tensor.is_floating_point():
            own = [self.batch]
            for size in shape[1:]:
                of = "source" if name == "source" else "sequence"
                own += self.atoms.make(f"{of}.{len(own)}.{size}", size, "s")
            if name in ("tokens", "source"):
                self.places[own[-1]] = ("source_positions" if name == "source"
                                        else "positions")
            if name == "tokens" and len(shape) > 1:
                self.graph.seq_len = shape[1]
            self.graph.input(name, self.graph.extents(own), "int32")
            return Act(name, own, [[atom] for atom in own])
        if name == "targets":  # of a loss of elements
            own = [self.batch] + [
                self.atoms.make(f"{name}.{i}", size, "f")[0]
                for i, size in enumerate(shape[1:])]
            self.graph.input(name, self.graph.extents(own), self.args.dtype)
            return Act(name, own, [[atom] for atom in own])
        # Images, signals (batch, channels, length) or features.
        own = [self.batch] + [
            self.atoms.make(f"{name}.{letter}", size, letter)[0]
            for letter, size in zip("cw" if len(shape) == 3 else "chw",
                                    shape[1:])]
        self.graph.input(name, self.graph.extents(own), self.args.dtype)
        return Act(name, own, [[atom] for atom in own])

    def extra(self, name, atoms):
        """An input of whole numbers that the data has and the model lacks."""
        return self.graph.input(name, self.graph.extents(atoms), "int32")

    def run(self):
        for node in self.traced.nodes:
            if node in self.values:
                continue
            value, problem = self.tried(node)
            behind = self.doubtful & set(node.all_input_nodes)
            if problem and behind:
                value, problem = self.tried_by_itself(node, behind)
            if problem:
                self.problems.append((node, problem))
            if problem or behind:
                self.doubtful.add(node)
            self.values[node] = value
            if writes_in_place(node) and not is_constant(value):
                same, _ = self.traced.aliases.written(node)
                self.values.update(dict.fromkeys(same, value))
        if not self.atoms.changed:
            self.problems += self.graph.conflicts
            for atom in self.read_whole:
                self.atoms.leave_whole(atom)
        return self

    def tried(self, node):
        """(the value, None), or (what stands for it, what the problem is)."""
        self.graph.at = node
        try:
            if node in self.traced.without_gradients:
                self.check_stopped(node)
            value = self.map(node)
            self.check_shape(node, value)
            return value, None
        except Unmappable as problem:
            return self.stand_in(node), str(problem)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError,
                ValueError) as error:
            return self.stand_in(node), (
                f"with these arguments is not known ({error!r})")

    def check_stopped(self, node):
        """A node in torch.no_grad may read what has no gradients alone: the
        others would be derived through it."""
        for read in node.all_input_nodes:
            made = read.meta.get("val")
            if isinstance(made, torch.Tensor) and made.is_floating_point() and (
                    not is_constant(self.values[read])):
                raise Unmappable("stops gradients (torch.no_grad), which are "
                                 "derived of all that the loss depends on")

    def check_shape(self, node, value):
        """Whatever handlers have overlooked is no graph of another model."""
        expected = node.meta.get("val")
        if isinstance(value, Act) and isinstance(expected, torch.Tensor) and (
                not self.atoms.changed and
                math.prod(value.shape) != expected.numel()):
            raise Unmappable(f"is broadcast to {list(expected.shape)} in a "
                             "form that is not known")

    def tried_by_itself(self, node, behind):
        """The same whatever the nodes `behind` others that could not be mapped
        make; no problem is named that may be theirs."""
        held = {n: self.values[n] for n in behind}
        if not all(isinstance(v, Act) for v in held.values()):
            return self.stand_in(node), None
        self.values.update({n: self.stand_in(n) for n in behind})
        tried = self.tried(node)
        self.values.update(held)
        return tried

    def stand_in(self, node):
        """A tensor for what could not be mapped, laid out as what reads it
        likes best: what is behind it is looked at, too."""
        def of(value, name):
            if not self.stands_in:
                return UNKNOWN
            if isinstance(value, (list, tuple)):
                return [of(v, f"{name}.{i}") for i, v in enumerate(value)]
            if not isinstance(value, torch.Tensor):
                return UNKNOWN
            dims, shape = [], list(value.shape)
            free = list(self.places)
            for d, size in enumerate(shape):
                place = next((a for a in free if d and a.extent == size), None)
                if d == 0 and size == self.batch.extent:
                    dims.append([self.batch])
                elif place:
                    free = []
                    dims.append([place])
                elif size == 1:
                    dims.append([])
                else:
                    image = len(shape) == 4 and not self.places
                    dims.append(self.atoms.make(
                        f"{name}.{d}", size, "bchw"[d] if image else "f"))
            own = flatten(dims)
            if len(dims) == 4 and self.places and dims[2] and (
                    dims[2][0] in self.places):
                own = flatten([dims[0], dims[2], dims[1], dims[3]])
            whole = not value.is_floating_point() and value.dtype != torch.bool
            self.graph.input(name, self.graph.extents(own),
                             "int32" if whole else self.args.dtype)
            if own[:1] != [self.batch]:
                self.graph.tensors[name].pop("sample_dim", None)
            return Act(name, own, dims)
        return of(node.meta.get("val"), f"?{node.name}")

    # ---- operands

    def of(self, argument):
        if isinstance(argument, torch.fx.Node):
            return self.values[argument]
        if isinstance(argument, (list, tuple)):
            return [self.of(item) for item in argument]
        return argument

    def map(self, node):
        if node.op == "get_attr":
            return self.traced.attribute(node)
        if node.op == "placeholder":
            raise Unmappable("an input that is no tensor")
        operands = [self.of(a) for a in node.args]
        keywords = {key: self.of(a) for key, a in node.kwargs.items()}
        every = torch.utils._pytree.tree_leaves([operands, keywords])
        if any(value is UNKNOWN for value in every):
            return UNKNOWN  # said where it is made
        if node.target is operator.getitem:
            if operands[0][operands[1]] is None and node.users:
                raise Unmappable("the second result, such as the places of "
                                 "the largest, is not known")
            return operands[0][operands[1]]
        if all(is_constant(value) for value in every):
            if operator_name(node).startswith("bernoulli"):
                return self.kept_samples(node, *operands, **keywords)
            return fold(node, operands, keywords)
        if writes_in_place(node) and self.traced.aliases.written(node)[1]:
            raise Unmappable("writes into memory that others read, too, such "
                             "as a part of a tensor")
        name = operator_name(node)
        # One that writes in place is as the other: Walk.run.
        handler = self.operators.get(name.removesuffix("_"))
        if handler is None:
            return by_others(self, node)
        return handler(self, node, *operands, **keywords)

    def kept_samples(self, node, like, share=0.5, **_):
        """Of stochastic depth, which keeps a share of the samples and is not
        applied: as many of each."""
        if sorted(like.shape)[:-1] != [1] * (like.dim() - 1) or (
                like.shape[0] != self.batch.extent):
            raise Unmappable("draws random numbers")
        self.warnings["stochastic depth is not applied"] = True
        return torch.full(like.shape, share)

    def known(self, value, dtype=None):
        """A constant as a tensor, which is not trained."""
        if value.is_meta:
            raise Unmappable("a constant without a value: build the module's "
                             "buffers on the CPU")
        if value.is_complex() or not value.numel():
            raise Unmappable("a constant of complex numbers, or of none")
        # What is the same for all samples is there once.
        if value.dim() and len(value) == self.batch.extent and torch.equal(
                value[:1].expand_as(value), value):
            value = value[:1]
        made = self.constant_of(value, dtype)
        first = made.dims[0] if made.dims else []
        # The same of (samples, windows).
        if len(first) > 1 and first[0].extent == self.batch.extent:
            one, *others = value.chunk(self.batch.extent)
            if all(torch.equal(one, other) for other in others):
                once = self.constant_of(one, dtype)
                return once.viewed([first[:1] + once.dims[0], *once.dims[1:]])
        return made

    def constant_of(self, value, dtype):
        numbers, key = numbers_of(value)
        name = self.atoms.constants.setdefault(
            key, self.traced.buffers.get(
                key, f"constant.{len(self.atoms.constants)}"))
        dims = [self.atoms.make(f"{name}.{d}", size, "f") if size > 1 else []
                for d, size in enumerate(numbers.shape)]
        own = flatten(dims)
        tensor = self.graph.constant(name, [a.extent for a in own],
                                     numbers.flatten().tolist(), dtype)
        return Act(tensor, own, dims)

    def act(self, value, what="operand"):
        """`value` as an Act."""
        if isinstance(value, torch.Tensor):
            return self.known(value)
        made = value.act(self) if isinstance(value, Value) else None
        if made is None:
            found = value.described if isinstance(value, Value) else (
                "a constant")
            raise Unmappable(f"{what} is {found}: expected a tensor that "
                             "another node computes")
        return made

    def tensor(self, value, what="operand"):
        """The same, with what is gathered applied."""
        x = self.act(value, what)
        if x.pieces:
            self.read_whole.append(x.cut)
            raise Unmappable(f"{what} is read whole and in pieces")
        if x.samples is None:
            return x
        y = self.once((x.tensor, x.samples.numpy().tobytes(), x.unseen),
                      lambda: self.apply(x))
        return dataclasses.replace(x, tensor=y, samples=None, last=None,
                                   step=(), unseen=None)

    def once(self, key, make):
        """What `make` makes, which is made for each key once."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def apply(self, x):
        """The tensor of x with its function: by one operator, or else by one
        for each of its steps."""
        letters = letters_of(x.own)

        def add(op, operands, **attributes):
            rule = ",".join([letters] * len(operands))
            return self.add(op, x.last, operands, f"{rule}->{letters}",
                            path=module_path(x.last), **attributes)[0]

        with contextlib.suppress(Unmappable):
            op, attributes = recognised(x)
            return add(op, [x.tensor], **attributes)
        name, operands, compute = x.step
        return by_steps(add, name, [
            self.tensor(v).tensor if isinstance(v, Act) else v
            for v in operands], compute)

    # ---- nodes

    def add(self, op, node, operands, rule, path=None, suffix=None, **more):
        path = module_path(node) if path is None else path
        name = path
        if suffix is not None or not self.traced.is_leaf(path):
            name = f"{path}/{suffix or op}" if path else suffix or op
        return self.graph.add(op, name, path, operands, rule, **more)

    def lookup(self, node, table, rows, width, source, ids, suffix, name=None):
        """Rows of a table by an input of whole numbers."""
        weight = self.graph.weight(name or table.label, [rows, width], source,
                                   stddev=self.stddev(0.02))
        return self.add("embedding", node, [ids, weight], "bs,vh->bsh",
                        suffix=suffix)[0]

    def sequence_of(self, length):
        """Of as many places; None where no input is one."""
        return next((a for a in self.places if a.extent == length), None)

    def stddev(self, default):
        """How matrices start: as the config says, or by PyTorch's default."""
        return getattr(self.config, "initializer_range", None) or default
