"""A model's graph file."""

import contextlib
import copy
import os
import pathlib

import torch

from .blocks import blocks_of
from .dimensions import Atoms
from .experts import Chosen, replace_experts, replace_routers
from .graph import INPUTS
from .loss import Loss, add_loss, logits_of
from .models import (hugging_face, on_cpu, own_model, torchvision_model,
                     without_memory)
from .operators import OPERATORS
from .problems import Unmappable, refuse
from .tracing import Traced
from .walk import Walk

MOST_WALKS = 100          # to find what is behind problems


def named_inputs(traced, encoder_decoder):
    """Inputs by the names that the data has (runtime/data)."""
    taken = set()
    named = []
    for node, name, tensor in traced.inputs:
        known = INPUTS.get(name)
        if encoder_decoder and name == "input_ids":
            known = "source"
        if known is None:
            known = "images" if tensor.is_floating_point() else "tokens"
        if known in taken:
            refuse(f"{traced.name}: inputs '{name}' and another one are both "
                     f"'{known}'; call them by what they are: "
                     f"{', '.join(sorted(set(INPUTS.values())))}")
        taken.add(known)
        named.append((node, known, tensor))
    return named


def walked(traced, args, atoms, parameters):
    """The walk that takes nothing more apart."""
    atoms.changed = True
    while atoms.changed:
        atoms.changed = False
        walk = Walk(traced, args, atoms, OPERATORS).run()
    if not walk.problems:
        overlapping = walk.graph.overlapping(parameters)
        walk.graph.read_twice |= overlapping
        walk.problems += [
            (traced.output, f"parameter '{name}' is read in parts that overlap")
            for name in sorted(overlapping)]
    return walk


def behind_problems(traced, args, atoms, walk):
    """A walk that has problems behind those of `walk`, too."""
    atoms = copy.deepcopy(atoms)
    for _ in range(MOST_WALKS):
        atoms.changed = False
        again = Walk(traced, args, atoms, OPERATORS, stands_in=True).run()
        if not atoms.changed:
            first = {node for node, _ in walk.problems}
            return again if first <= {n for n, _ in again.problems} else walk
    return walk


def export(args):
    """(the graph file's contents, the Walk, the module)."""
    if ":" in args.model and not os.path.exists(args.model):
        make = (torchvision_model if args.model.startswith("torchvision:")
                else own_model)
    else:
        make = hugging_face
    memory = contextlib.nullcontext() if args.weights else without_memory()
    torch.manual_seed(args.seed)
    with memory:
        module, inputs = make(args)
    module = on_cpu(module.train())
    replace_experts(module)
    replace_routers(module)
    path = pathlib.Path(args.model.partition(":")[2] or args.model)
    name = path.parent.name if path.name == "config.json" else path.name
    traced = Traced(module, inputs, args, args.name or name)
    config = getattr(module, "config", None)
    traced.inputs = named_inputs(
        traced, getattr(config, "is_encoder_decoder", False))
    atoms = Atoms()
    parameters = dict(module.named_parameters())
    walk = walked(traced, args, atoms, parameters)
    if walk.problems and walk.graph.read_twice:
        other_atoms = copy.deepcopy(atoms)
        other_atoms.whole |= walk.graph.read_twice
        other = walked(traced, args, other_atoms, parameters)
        if not other.problems:
            walk, atoms = other, other_atoms
    if walk.problems:
        walk = behind_problems(traced, args, atoms, walk)
    output = walk.values.get(traced.output)
    if not walk.problems:
        try:
            if not isinstance(output, Loss):
                if not args.loss:
                    raise Unmappable("is not a loss; --loss adds the mean "
                                     "cross-entropy of it")
                logits = (output.logits if isinstance(output, Chosen) else
                          output)
                output = add_loss(
                    walk, logits_of(walk, traced.output, logits), "loss")
        except Unmappable as problem:
            walk.problems.append((traced.output, str(problem)))
    if walk.problems:
        return None, walk, module
    walk.graph.prune(output.tensor)
    blocks = blocks_of(walk.graph, module)
    return walk.graph.json(output.tensor, blocks), walk, module
