"""Which nodes share memory: a view has that of its base, and what writes in
place writes into all of them."""

import operator

import torch


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

    def written(self, node):
        """Of a node that writes in place: those that are what it makes from
        now on, and whether others that share its memory are read later."""
        before = [n for n in self.sharing[self.root[node]]
                  if self.place[n] < self.place[node]]
        same = [n for n in before if self.whole[n] == self.whole[node]]
        later = any(self.place.get(user, 0) > self.place[node]
                    for n in before if n not in same for user in n.users)
        return same, later
