"""torch.cat: of tensors, and of the parts of a rotary embedding or of an
image's patches."""

import torch

from .nodes import shape_of
from .patches import Patches, join_patches
from .places import Part, concatenated
from .problems import Unmappable
from .rotary import Turned, rotary


def cat(walk, node, parts, dim=0):
    rank = len(shape_of(node))
    dim %= rank
    parts = [p for p in parts if (
        p.start < p.stop if isinstance(p, Part) else
        p.numel() if isinstance(p, torch.Tensor) else True)]
    if len(parts) == 1:
        return parts[0]
    kinds = [type(p) for p in parts]
    if kinds == [Part, Part] and dim == rank - 1:
        a, b = parts
        if (a.x.tensor == b.x.tensor and a.sign == -1 and b.sign == 1 and
                a.start == b.stop and a.stop - a.start == b.stop - b.start):
            return Turned(a.x, b.start, a.stop, swapped=True, node=node)
    if kinds == [Turned, Part] and dim == rank - 1:
        a, b = parts
        if a.x.tensor == b.x.tensor and a.stop == b.start:
            try:
                return rotary(walk, node, a, b.stop)
            except Unmappable:
                if walk.atoms.changed:
                    raise
    if len(parts) == 2 and isinstance(parts[1], Patches) and dim == 1:
        return join_patches(walk, node, *parts)
    return concatenated(walk, node, [walk.tensor(p) for p in parts], dim)
