"""Padding, and images and signals of another size."""

from .dimensions import Atom
from .images import image
from .layout import compact
from .nodes import shape_of
from .places import concatenated, placed, sliced_off


def resampled(walk, node, x, dim, size, start, step, linear):
    return placed(walk, node, x, dim, size, "resample", start=start, step=step,
                  linear=linear)


def resized(linear):
    """Images and signals of another size (nn.Upsample)."""
    def resize(walk, node, x, sizes=None, *more):
        aligned = more[0] if linear else False
        factors = more[-1] if more else None
        x = image(walk, node, x)
        for i, size in enumerate(shape_of(node)[2:]):
            before = x.shape[i + 2]
            if size == before:
                continue
            # As PyTorch computes it, by the factor where one is given.
            step = 1 / factors[i] if factors else before / size
            start = step / 2 - 0.5 if linear else 1e-9
            if aligned:
                step = (before - 1) / (size - 1) if size > 1 else 1
                start = 0
            x = resampled(walk, node, x, i + 2, size, start, step or 1, linear)
        return x
    return resize


def padded(walk, node, x, pads, mode="constant", value=None):
    """The last dimensions first, each in front and behind."""
    x = walk.tensor(x)
    for i in range(0, len(pads), 2):
        before, behind = pads[i:i + 2]
        dim = len(x.dims) - 1 - i // 2
        size = x.shape[dim]
        if min(before, behind) < 0:  # what is cut off
            start, stop = max(0, -before), size - max(0, -behind)
            x = sliced_off(walk, node, x, dim, start, stop - start)
            before, behind, size = max(0, before), max(0, behind), stop - start
        if before == behind == 0:
            continue
        whole = size + before + behind
        if mode == "constant":
            x = placed(walk, node, x, dim, whole, "pad", before=before,
                       value=value or 0)
        elif mode == "replicate":
            x = resampled(walk, node, x, dim, whole, -before, 1, False)
        else:
            # Runs of places that are turned round, or are those of the other
            # end.
            turned = mode == "reflect"
            step = -1 if turned else 1
            front = [sliced_off(walk, node, x, dim, before if turned else
                                size - before, before, step)] if before else []
            back = [sliced_off(walk, node, x, dim, size - 2 if turned else 0,
                               behind, step)] if behind else []
            x = concatenated(walk, node, [*front, x, *back], dim)
    return x


def padded_by(mode):
    return lambda walk, node, x, pads: padded(walk, node, x, pads, mode)


def pixel_shuffle(walk, node, x, factor):
    """Channels (c, r, r) as blocks of pixels."""
    x = compact(walk, node, x)
    _, channels, height, width = x.dims
    if len(channels) < 3:
        last = channels[-1]
        if len(channels) == 1:
            last = walk.atoms.split(last, last.extent // factor ** 2)[-1]
        walk.atoms.split(last, factor)
        return x  # not in this walk
    c, *block = channels
    return x.viewed([x.dims[0], [c], height + block[:1], width + block[1:]])


def tiled(walk, node, x, times):
    """torch.Tensor.repeat: dimensions behind themselves; of 1, atoms that the
    tensor lacks."""
    x = walk.act(x)
    x = x.viewed([[]] * (len(times) - len(x.dims)) + x.dims)
    sizes = x.shape
    for d, n in enumerate(times):
        if n > 1 and sizes[d] > 1:
            x = concatenated(walk, node, [x] * n, d)
    made = [walk.batch] + [Atom(f"{node.name}.{d}", n, "r")
                           for d, n in enumerate(times) if d > 0]
    return x.viewed([[atom] if n > 1 and size == 1 else dim for
                     dim, size, n, atom in zip(x.dims, sizes, times, made)])
