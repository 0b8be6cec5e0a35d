"""Blocks of a graph, which a pipeline's stages are made of."""

from torch import nn

LAYERS = ("linear", "linear_fp32", "conv2d", "expert_linear", "embedding")


def members(module):
    """Those of a list of modules of one kind, by name; or none."""
    numbered = {name: child for name, child in module.named_children()
                if name.isdigit()}
    kinds = [type(child) for child in numbered.values()]
    alike = len(set(kinds)) < len(kinds) or isinstance(module, nn.ModuleList)
    return numbered if alike else {}


def repeats(module):
    """Whether some of a list's members are equal."""
    shapes = [(type(child), [p.shape for p in child.parameters()])
              for child in members(module).values()]
    return any(s[1] and s in shapes[:i] for i, s in enumerate(shapes))


def block_prefixes(module):
    """Paths of the members of each outermost list of modules alike, but for
    those of a list of stages, whose members have equal layers and differ."""
    prefixes = []

    def visit(path, parent):
        of_list = members(parent)
        stages = not repeats(parent) and any(
            repeats(part) for child in of_list.values()
            for part in child.modules())
        for name, child in parent.named_children():
            below = f"{path}.{name}" if path else name
            if name in of_list and not stages:
                prefixes.append(below)
            else:
                visit(below, child)

    visit("", module)
    return prefixes


def blocks_of(graph, module):
    """The block of each node. What stands between the members of lists is a
    block of its own, and so is each member that has a layer."""
    prefixes = set(block_prefixes(module))

    def prefix(path):
        parts = path.split(".")
        return next((p for n in range(1, len(parts) + 1)
                     if (p := ".".join(parts[:n])) in prefixes), None)

    runs = []  # [prefix, nodes]
    for name, node in graph.nodes.items():
        key = prefix(graph.paths[name])
        # Transposes are called by what they read, wherever they are needed.
        if not runs or (runs[-1][0] != key and node["op"] != "transpose"):
            runs.append([key, []])
        runs[-1][1].append(node)
    if len(runs) == 1:
        runs = [[None, nodes] for nodes in single_tensor_cuts(graph)]
    merged = []
    for run in runs:
        layer = any(node["op"] in LAYERS for node in run[1])
        if merged and not (layer and merged[-1][2]):
            # Without a layer of its own it belongs to what is before it.
            if not merged[-1][2]:
                merged[-1][0] = run[0] or merged[-1][0]
            merged[-1][1] += run[1]
            merged[-1][2] |= layer
        else:
            merged.append([*run, layer])
    blocks, taken = [], set()
    for i, (key, nodes, _) in enumerate(merged):
        ends = {0: "embed", len(merged) - 1: "head"}
        name = key or ends.get(i) or nodes[0]["name"]
        while name in taken:
            name += "'"
        taken.add(name)
        blocks += [name] * len(nodes)
    return blocks


def single_tensor_cuts(graph):
    """Runs of nodes behind which a single tensor goes on."""
    nodes = list(graph.nodes.values())
    last = {t: i for i, node in enumerate(nodes) for t in node["operands"]}
    runs, alive = [[]], set()
    for i, node in enumerate(nodes):
        runs[-1].append(node)
        alive |= {t for t in node["results"] if last.get(t, -1) > i}
        alive = {t for t in alive if last[t] > i}
        if len(alive) == 1:
            runs.append([])
    return [run for run in runs if run]
