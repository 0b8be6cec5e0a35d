"""Images (batch, channels, height, width) and signals (batch, channels,
length): convolutions and pooling."""

import math

import torch

from .decompositions import by_others
from .dimensions import Atom, extent, flatten
from .layout import apart, compact, merged, one_atom
from .nodes import shape_of
from .parameters import Param, vector
from .problems import Unmappable
from .products import product
from .values import Act


def each(value, directions, fallback=None):
    value = fallback if value is None or value == [] else value
    if not isinstance(value, (list, tuple)):
        value = [value]
    return list(value) * (directions // len(value))


def image(walk, node, x, features=False):
    """Images or signals, or where `features` is true features alone."""
    x = compact(walk, node, x)
    if (len(x.dims) not in ((2, 3, 4) if features else (3, 4)) or
            x.dims[0] != [walk.batch]):
        raise Unmappable("expected images (batch, channels, height, width), or "
                         "signals (batch, channels, length)")
    for dim in range(1, len(x.dims)):
        if dim > 1 or len(x.dims[1]) != 2:
            x = one_atom(walk, node, x, dim)
    return x


def letters_of_channels(x):
    return "c" if len(x.dims[1]) == 1 else "gc"


def letters_of_windows(x):
    """Of the image, the window and its places; signals have no height."""
    return ("h!w!", "k!l!", "yx") if len(x.dims) == 4 else ("w!", "l!", "x")


def of_image(walk, node, tensor, x, channels, sizes=None):
    """A result of the size that PyTorch says. A sequence stays one."""
    sizes = sizes or shape_of(node)[2:]
    places = [[Atom(f"{node.name}.{name}", size, dim[0].letter)]
              for name, size, dim in zip("hw"[-len(sizes):], sizes, x.dims[2:])]
    y = Act(tensor, [*x.dims[0], *channels, *flatten(places)],
            [x.dims[0], channels, *places])
    if walk.atoms.changed:  # what reads it is of no use
        return y
    for dim in range(len(y.dims) - 1, 0, -1):
        if len(y.dims[dim]) == 1:
            y = apart(walk, node, y, dim)
    return y


def sides(name, values, without):
    """Attributes of both sides; what a signal has of the height."""
    height, width = values if len(values) == 2 else (without, values[0])
    return {f"{name}_height": height, f"{name}_width": width}


def window_attributes(stride, padding):
    top, left = padding if len(padding) == 2 else (0, padding[0])
    return {"pad_top": top, "pad_left": left, **sides("stride", stride, 1)}


def in_groups(walk, node, x, groups):
    """x, whose channels, where they are several atoms that are not these
    groups (as those of shuffled channels), are joined and taken apart anew."""
    channels = x.dims[1]
    if groups == 1 or len(channels) == 1 or channels[0].extent == groups:
        return x
    x = merged(walk, node, x, 1)
    return apart(walk, node, x, 1, new_groups(
        f"{node.name}.in", extent(channels), groups))


def new_groups(name, size, groups):
    return [Atom(f"{name}.groups", groups, "c"),
            Atom(f"{name}.each", size // groups, "c")]


def groups_of(walk, x, out_name, out_size, groups):
    """Channels of both sides, as groups and channels in a group where there
    are several groups; REQUIRES: in_groups. What is made is in other parts than
    what reads it wants where that takes other groups: behind_groups."""
    channels, out = x.dims[1], walk.atoms.make(out_name, out_size, "c")
    if groups > 1:
        if len(channels) == 1:
            channels = walk.atoms.split(channels[0], groups)
        if len(out) == 1:
            out = walk.atoms.split(out[0], groups)
        elif out[0].extent != groups or len(out) != 2:
            out = new_groups(out_name, out_size, groups)
    # A rule has not more than three letters of channels on both sides.
    if groups == 1 and len(channels) + len(out) > 3:
        out = [Atom(out_name, extent(out), "c")]
    return channels, out


def behind_groups(walk, node, y, out_name, groups):
    """y with its channels in the parts that what reads it wants."""
    wanted = walk.atoms.make(out_name, extent(y.dims[1]), "c")
    if walk.atoms.changed or groups == 1 or len(wanted) == 1 or (
            wanted == y.dims[1]):
        return y
    return apart(walk, node, merged(walk, node, y, 1), 1, wanted)


def convolution(walk, node, x, weight, bias=None, stride=1, padding=0,
                dilation=1, groups=1):
    window = weight.shape[2:]
    n = len(window)
    stride, dilation = each(stride, n), each(dilation, n)
    if isinstance(padding, str):
        padding = [0] * n if padding == "valid" else [
            d * (k - 1) // 2 for d, k in zip(dilation, window)]
    padding = each(padding, n)
    x = in_groups(walk, node, image(walk, node, x), groups)
    channels, out = groups_of(walk, x, f"{node.name}.c", weight.shape[0],
                              groups)
    if walk.atoms.changed:
        return of_image(walk, node, x.tensor, x, out)
    into = "c" if len(channels) == 1 else "gc"
    made = "o" if len(out) == 1 else "gn" if groups > 1 else "pn"
    read = channels[1:] if groups > 1 else channels
    shape = [a.extent for a in out]
    full = shape + [a.extent for a in read] + list(window)
    stddev = math.sqrt(2 * groups / (weight.shape[0] * math.prod(window)))
    if isinstance(weight, Param):
        matrix = walk.graph.weight(weight.name, full, (weight, ()),
                                   stddev=stddev)
    else:
        matrix = computed_window(walk, node, weight, full)
        if walk.atoms.changed:
            return of_image(walk, node, x.tensor, x, out)
    operands = [x.tensor, matrix]
    hw, kl, yx = letters_of_windows(x)
    rule = f"b{into}{hw},{made}{'c' if groups > 1 else into}{kl}"
    if bias is not None:
        operands.append(vector(walk, bias, shape))
        rule += f"+{made}"
    sizes = shape_of(node)[2:]
    y = walk.add("conv2d", node, operands, f"{rule}->b{made}{yx}",
                 sizes=dict(zip(yx, sizes)), **sides("dilation", dilation, 1),
                 **sides("out", sizes, 1),
                 **window_attributes(stride, padding))[0]
    return behind_groups(walk, node, of_image(walk, node, y, x, out),
                         f"{node.name}.c", groups)


def computed_window(walk, node, weight, shape):
    """The tensor of a window that is no parameter, such as a normed one
    (weight_norm): where groups are apart it is, too."""
    for dim in range(len(weight.dims)):
        if not weight.dims[dim]:
            weight = one_atom(walk, node, weight, dim)
    weight = compact(walk, node, weight)
    own = weight.own
    if len(own) < len(shape):
        # A dimension of 1, or channels that are (groups, channels).
        for dim, size in zip(weight.dims[:2], shape):
            if len(dim) == 1 and dim[0].extent != size:
                walk.atoms.split(dim[0], size)
                return None
    if [a.extent for a in own] != shape:
        raise Unmappable(f"a window of {[a.extent for a in own]} that is "
                         f"computed: expected {shape}")
    return weight.tensor


def transposed_convolution(walk, node, x, weight, bias=None, stride=1,
                           padding=0, output_padding=0, groups=1, dilation=1):
    """Its weight is (in, out of a group, window)."""
    if not isinstance(weight, Param):
        raise Unmappable("expected a window of parameters")
    window = weight.shape[2:]
    n = len(window)
    x = in_groups(walk, node, image(walk, node, x), groups)
    channels, out = groups_of(walk, x, f"{node.name}.c",
                              weight.shape[1] * groups, groups)
    if walk.atoms.changed:
        return of_image(walk, node, x.tensor, x, out)
    read = "n" if len(channels) == 1 else "gn" if groups > 1 else "pn"
    made = "c" if len(out) == 1 else "gc" if groups > 1 else "oc"
    shape = [a.extent for a in out]
    full = [a.extent for a in channels] + shape[groups > 1:] + list(window)
    stddev = math.sqrt(2 / (weight.shape[1] * math.prod(window)))
    matrix = walk.graph.weight(weight.name, full, (weight, ()), stddev=stddev)
    hw, kl, yx = letters_of_windows(x)
    sizes = shape_of(node)[2:]
    y = walk.add("conv_transpose2d", node, [x.tensor, matrix],
                 f"b{read}{yx},{read}{'c' if groups > 1 else made}{kl}"
                 f"->b{made}{hw}", sizes=dict(zip(hw.replace("!", ""), sizes)),
                 **sides("dilation", each(dilation, n), 1),
                 **sides("image", sizes, 1),
                 **window_attributes(each(stride, n), each(padding, n)))[0]
    if bias is not None:
        rule = f"b{made}{hw}".replace("!", "")
        y = walk.add("broadcast_add", node, [y, vector(walk, bias, shape)],
                     f"{rule},{made}->{rule}", suffix="bias")[0]
    return behind_groups(walk, node, of_image(walk, node, y, x, out),
                         f"{node.name}.c", groups)


def pool(walk, node, x, op, window, stride, padding, shape=None, **more):
    """`shape`: of the result, where the node makes several."""
    x = image(walk, node, x)
    n = len(x.dims) - 2
    window, padding = each(window, n), each(padding, n)
    stride = each(stride, n, window)
    c = letters_of_channels(x)
    hw, _, yx = letters_of_windows(x)
    sizes = (shape or shape_of(node))[2:]
    y = walk.add(op, node, [x.tensor], f"b{c}{hw}->b{c}{yx}",
                 sizes=dict(zip(yx, sizes)), **sides("window", window, 1),
                 **sides("out", sizes, 1), **more,
                 **window_attributes(stride, padding))[0]
    return of_image(walk, node, y, x, x.dims[1], sizes)


def max_pool(walk, node, x, window, stride=None, padding=0, dilation=1,
             ceil=False):
    if set(each(dilation, 2)) != {1}:
        raise Unmappable("a dilated window")
    return pool(walk, node, x, "max_pool", window, stride, padding)


def average_pool(walk, node, x, window, stride=None, padding=0, ceil=False,
                 count_pad=True, divisor=None):
    if divisor is not None:
        raise Unmappable("a divisor of its own")
    return pool(walk, node, x, "average_pool", window, stride, padding,
                count_pad=count_pad)


def adaptive_pool(walk, node, x, size):
    x = image(walk, node, x)
    into = x.shape[2:]
    out = each(size, len(into))
    if set(out) == {1}:
        return image_mean(walk, node, x, keep=True)
    if out == into:
        return x
    if any(i % o for i, o in zip(into, out)):
        return means_of_windows(walk, node, x, into, out)
    window = [i // o for i, o in zip(into, out)]
    return pool(walk, node, x, "average_pool", window, None, 0, count_pad=1)


def means_of_windows(walk, node, x, into, out):
    """Of windows of several sizes: a product with their shares, direction by
    direction. Window i of o is [floor(i n / o), ceil((i + 1) n / o))."""
    for dim, (n, o) in enumerate(zip(into, out), 2):
        if n == o:
            continue
        shares = torch.zeros(n, o)
        for i in range(o):
            begin, end = i * n // o, -(-(i + 1) * n // o)
            shares[begin:end, i] = 1 / (end - begin)
        order = [d for d in range(len(x.dims)) if d != dim] + [dim]
        y = product(walk, node, x.viewed([x.dims[d] for d in order]),
                    walk.known(shares))
        x = y.viewed([y.dims[order.index(d)] for d in range(len(order))])
    return x


def adaptive_max_pool(walk, node, x, size):
    x = image(walk, node, x)
    into = x.shape[2:]
    out = [i if o is None else o for i, o in zip(into, each(size, len(into)))]
    if any(i % o for i, o in zip(into, out)):
        return by_others(walk, node)
    window = [i // o for i, o in zip(into, out)]
    return [pool(walk, node, x, "max_pool", window, None, 0,
                 shape=[*x.shape[:2], *out]), None]


def image_mean(walk, node, x, keep):
    x = image(walk, node, x)
    c = letters_of_channels(x)
    if len(x.dims) == 4:
        y = walk.add("image_mean", node, [x.tensor], f"b{c}hw->b{c}")[0]
    else:
        y = walk.add("reduce_mean", node, [x.tensor], f"b{c}w->b{c}")[0]
    places = len(x.dims) - 2
    return Act(y, x.own[:-places],
               x.dims[:2] + ([[]] * places if keep else []))
