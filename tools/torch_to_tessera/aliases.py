"""Which nodes share memory: a view has that of its base, and what writes in
place writes into all of them."""

import operator

import torch

from .nodes import operator_name


def writes_in_place(node):
    name = getattr(node.target, "__name__", "").split(".")[0]
    return name.endswith("_") and not name.endswith("__")


def memory_of(node):
    """The operand whose memory a node's result has, or may have; or None."""
    if not node.args or not isinstance(node.args[0], torch.fx.Node):
        return None
    if writes_in_place(node):
        return node.args[0]
    if node.target is operator.getitem:  # one of several results
        return memory_of(node.args[0])
    schema = getattr(node.target, "_schema", None)
    shares = schema and schema.arguments[0].alias_info and any(
        result.alias_info for result in schema.returns)
    return node.args[0] if shares else None


class Aliases:
    """Of the nodes of a graph that `output` depends on."""

    def __init__(self, graph, output):
        self.root, self.whole = {}, {}
        for node in graph.nodes:
            base = memory_of(node)
            self.root[node] = self.root.get(base, node)
            self.whole[node] = (self.whole[base] if writes_in_place(node) and
                                base is not None else node)
        needed, memory = {output}, {self.root[output]}
        for node in reversed(graph.nodes):
            if node in needed or (writes_in_place(node) and
                                  self.root[node] in memory):
                needed |= {node, *node.all_input_nodes}
                memory |= {self.root[n] for n in node.all_input_nodes}
        self.nodes = [node for node in graph.nodes if node in needed]
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.sharing = {}  # the nodes of a root
        for node in self.nodes:
            self.sharing.setdefault(self.root[node], []).append(node)

    def is_written(self, node):
        """Whether something writes into its memory."""
        return any(writes_in_place(n)
                   for n in self.sharing.get(self.root[node], ()))

    def written(self, node):
        """Of a node that writes in place: those that are what it makes from
        now on, and whether others that share its memory are read later."""
        before = [n for n in self.sharing[self.root[node]]
                  if self.place[n] < self.place[node]]
        same = [n for n in before if self.whole[n] == self.whole[node]]
        later = any(self.place.get(user, 0) > self.place[node]
                    for n in before if n not in same for user in n.users)
        return same, later


def join_written_parts(graph):
    """A tensor without elements, all of which are then copied into its parts
    along a dimension, is these beside each other."""
    for node in list(graph.nodes):
        if operator_name(node) not in ("empty", "new_empty", "empty_like"):
            continue
        size = node.meta["val"].shape
        parts = []  # (dimension, start, stop, what is copied, the copy)
        for part in node.users:
            copy = next(iter(part.users), None)
            if (operator_name(part) != "slice" or len(part.args) != 4 or
                    len(part.users) != 1 or operator_name(copy) != "copy_" or
                    copy.users or copy.args[0] is not part):
                continue
            dim = part.args[1] % len(size)
            start, stop, _ = slice(*part.args[2:]).indices(size[dim])
            value = copy.args[1].meta["val"].shape
            if list(value) == list(part.meta["val"].shape):
                parts.append((dim, start, stop, copy.args[1], copy))
        parts.sort(key=lambda part: part[:3])
        if not parts or len({part[0] for part in parts}) > 1 or [
                part[1] for part in parts] + [size[parts[0][0]]] != [
                0] + [part[2] for part in parts]:
            continue
        readers = [n for n in node.users
                   if n not in [part[4].args[0] for part in parts]]
        place = {n: i for i, n in enumerate(graph.nodes)}
        last = max((part[4] for part in parts), key=place.get)
        if any(place[reader] < place[last] for reader in readers):
            continue
        with graph.inserting_after(last):
            whole = graph.call_function(torch.ops.aten.cat.default, (
                [part[3] for part in parts], parts[0][0]))
        whole.meta = dict(last.meta, val=node.meta["val"])
        for reader in readers:
            reader.replace_input_with(node, whole)
        for *_, copy in parts:
            part = copy.args[0]
            graph.erase_node(copy)
            graph.erase_node(part)
        graph.erase_node(node)
