"""Small models of images, signals and texts beside transformers, which
against_onnx.py and against_export.py train: MODELS, by name the module and an
example of its input. `image_models:NAME` is one for tools/export_torch.py.

Classes are LABELS, or all tokens of a text.
"""

import functools
import sys

import torch
import torchvision
from torch import nn
from torch.nn import functional as F

LABELS, TOKENS = 10, 256


class Chomp(nn.Module):
    """Without the last places, which padding of both sides adds."""

    def __init__(self, places):
        super().__init__()
        self.places = places

    def forward(self, x):
        return x[:, :, :-self.places]


class Temporal(nn.Module):
    """Dilated causal convolutions (Bai et al. 2018), by the last place."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        for i in range(3):
            layers = []
            for inputs in (3 if i == 0 else 8, 8):
                pad = 2 * 2 ** i
                layers += [nn.Conv1d(inputs, 8, 3, padding=pad,
                                     dilation=2 ** i), Chomp(pad), nn.ReLU()]
            self.blocks.append(nn.Sequential(*layers))
        self.shortcut = nn.Conv1d(3, 8, 1)
        self.head = nn.Linear(8, LABELS)

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = F.relu(block(x) + (self.shortcut(x) if i == 0 else x))
        return self.head(x[:, :, -1])


class Audio(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 8, 16, 4), nn.BatchNorm1d(8), nn.ReLU(),
            nn.MaxPool1d(2), nn.Conv1d(8, 16, 3, padding=1, groups=2),
            nn.BatchNorm1d(16), nn.ReLU(), nn.AvgPool1d(2))
        self.head = nn.Linear(16, LABELS)

    def forward(self, x):
        return self.head(self.layers(x).mean(-1))


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm1d(12), nn.Linear(12, 32), nn.BatchNorm1d(32),
            nn.ReLU(), nn.Linear(32, LABELS))

    def forward(self, x):
        return self.layers(x)


class Text(nn.Module):
    """Convolutions of a sequence, of which each token has a class."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.convs = nn.ModuleList(
            nn.Conv1d(16, 8, width, padding=width // 2) for width in (3, 5))
        self.head = nn.Linear(16, TOKENS)

    def forward(self, tokens):
        x = self.embedding(tokens).transpose(1, 2)
        y = torch.cat([F.relu(conv(x)) for conv in self.convs], 1)
        return self.head(y.transpose(1, 2))


NORMS = {"batch": nn.BatchNorm2d, "group": lambda n: nn.GroupNorm(2, n),
         "instance": lambda n: nn.InstanceNorm2d(n, affine=True)}


class UNet(nn.Module):
    """Ronneberger et al. (2015), a class for the whole image."""

    def __init__(self, up, norm):
        super().__init__()

        def stage(inputs, outputs):
            layers = []
            for n in (inputs, outputs):
                layers += [nn.Conv2d(n, outputs, 3, padding=1),
                           NORMS[norm](outputs), nn.ReLU()]
            return nn.Sequential(*layers)

        def larger(inputs, outputs):
            if up == "transposed":
                return nn.ConvTranspose2d(inputs, outputs, 2, 2)
            mode = {"mode": up} if up == "nearest" else {
                "mode": "bilinear", "align_corners": up == "corners"}
            return nn.Sequential(nn.Upsample(scale_factor=2, **mode),
                                 nn.Conv2d(inputs, outputs, 1))

        self.down1, self.down2 = stage(3, 8), stage(8, 16)
        self.middle = stage(16, 32)
        self.larger2, self.larger1 = larger(32, 16), larger(16, 8)
        self.up2, self.up1 = stage(32, 16), stage(16, 8)
        self.head = nn.Conv2d(8, LABELS, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        x = self.larger2(self.middle(F.max_pool2d(two, 2)))
        x = self.larger1(self.up2(torch.cat([two, x], 1)))
        return self.head(self.up1(torch.cat([one, x], 1))).mean((2, 3))


class Generator(nn.Module):
    """Of DCGAN (Radford et al. 2016), with a class behind it."""

    def __init__(self):
        super().__init__()
        layers = []
        for inputs, outputs, more in ((12, 32, (1, 0)), (32, 16, (2, 1))):
            layers += [nn.ConvTranspose2d(inputs, outputs, 4, *more,
                                          bias=False),
                       nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(
            *layers, nn.ConvTranspose2d(16, LABELS, 4, 2, 1), nn.Tanh())

    def forward(self, x):
        return self.layers(x[:, :, None, None]).mean((2, 3))


class Waves(nn.Module):
    """Padding by what is at an edge and by reflection, groups, resampling."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv1d(8, 8, 3, padding=1, padding_mode="reflect"),
            nn.ReplicationPad1d(2), nn.Conv1d(8, 8, 5), nn.ReLU(),
            nn.ConvTranspose1d(8, 6, 4, 2, 1, groups=2), nn.ReLU(),
            nn.Upsample(scale_factor=2, mode="linear"),
            nn.Conv1d(6, LABELS, 1))

    def forward(self, x):
        return self.layers(x).mean(2)


class Shuffled(nn.Module):
    """Pixels from channels (Shi et al. 2016)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=1), nn.PixelShuffle(2),
            nn.Conv2d(4, 8, 3, padding=1), nn.PReLU(),
            nn.Conv2d(8, LABELS, 1))

    def forward(self, x):
        return self.layers(x).mean((2, 3))


class Pools(nn.Module):
    """Windows of all kinds, and a norm of each channel's places."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding="same", dilation=2), nn.ELU(),
            nn.AdaptiveAvgPool2d(8), nn.Conv2d(8, 8, 3, padding="valid"),
            nn.Hardtanh(-2, 1.5), nn.AvgPool2d(2, ceil_mode=True),
            nn.GroupNorm(8, 8, affine=False), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(8, LABELS))

    def forward(self, x):
        return self.layers(x)


class Normed(nn.Module):
    """Convolutions whose windows are normed, with groups and without, and
    windows of several sizes."""

    def __init__(self):
        super().__init__()
        normed = nn.utils.parametrizations.weight_norm
        self.layers = nn.Sequential(
            normed(nn.Conv2d(3, 8, 3, padding=1)), nn.Tanh(),
            nn.AdaptiveAvgPool2d((7, 5)),
            normed(nn.Conv2d(8, 8, 3, padding=1, groups=4)), nn.Tanh(),
            nn.AdaptiveAvgPool2d((6, 4)), nn.AdaptiveMaxPool2d((3, 2)),
            nn.Flatten(), nn.Linear(48, LABELS))

    def forward(self, x):
        return self.layers(x)


class Depths(nn.Module):
    """Mixture of depths (Raposo et al. 2024): a router chooses half of the
    tokens of a sequence, which alone go through the layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 16)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 16, 16))
        self.router = nn.Linear(16, 1)
        self.layer = nn.Sequential(nn.Linear(16, 32), nn.GELU(),
                                   nn.Linear(32, 16))
        self.head = nn.Linear(16, TOKENS)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions
        weights, chosen = torch.topk(self.router(x), tokens.shape[1] // 2, 1)
        chosen = chosen.expand(-1, -1, x.shape[-1])
        y = self.layer(torch.gather(x, 1, chosen)) * torch.sigmoid(weights)
        return self.head(torch.scatter_add(x, 1, chosen, y))


class ConvNext(nn.Module):
    """Liu et al. (2022): norms of channels behind depthwise convolutions, and
    a scale of each channel."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 2, 2)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "depthwise": nn.Conv2d(16, 16, 7, padding=3, groups=16),
            "norm": nn.LayerNorm(16, eps=1e-6),
            "mlp": nn.Sequential(nn.Linear(16, 64), nn.GELU(),
                                 nn.Linear(64, 16))}) for _ in range(2))
        self.gammas = nn.ParameterList(0.1 * torch.ones(16) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, LABELS)

    def forward(self, x):
        x = self.stem(x)
        for block, gamma in zip(self.blocks, self.gammas):
            y = block["depthwise"](x).permute(0, 2, 3, 1)
            y = gamma * block["mlp"](block["norm"](y))
            x = x + y.permute(0, 3, 1, 2)
        return self.head(self.norm(x.mean((2, 3))))


def numbers(*shape):
    return lambda: torch.rand(2, *shape) * 2 - 1


def tokens():
    return torch.randint(0, TOKENS, (2, 16))


def torchvisions(name, **more):
    """A factory of torchvision's, as it is published but for the labels, and
    without what it draws."""
    return functools.partial(torchvision.models.get_model, name, weights=None,
                             num_classes=LABELS, **more)


# EfficientNet, RegNet and the like, all of their layers.
class UnevenPools(nn.Module):
    """Windows of several sizes, of images and of signals."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.most = nn.AdaptiveMaxPool2d((4, 3))
        self.rows = nn.AdaptiveMaxPool1d(5)
        self.fc = nn.Linear(30, 10)

    def forward(self, images):
        x = self.most(torch.tanh(self.conv(images))).flatten(2)
        return self.fc(self.rows(x).flatten(1))


class ShuffledChannels(nn.Module):
    """Channels that change places between convolutions of two groups, of one
    group each, and of three (ShuffleNet)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.first = nn.Conv2d(12, 12, 1, groups=2, bias=False)
        self.each = nn.Conv2d(12, 12, 3, 2, 1, groups=12)
        self.norm = nn.BatchNorm2d(12)
        self.second = nn.Conv2d(12, 24, 1, groups=3)
        self.fc = nn.Linear(24, 10)

    def forward(self, images):
        x = F.relu(self.first(F.relu(self.stem(images))))
        x = self.norm(self.each(F.channel_shuffle(x, 2)))
        x = F.channel_shuffle(F.relu(self.second(x)), 3)
        return self.fc(x.mean((2, 3)))


class Cbam(nn.Module):
    """Attention to channels and to places (Woo et al. 2018)."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.channels = nn.Sequential(nn.Flatten(), nn.Linear(8, 2), nn.ReLU(),
                                      nn.Linear(2, 8))
        self.places = nn.Conv2d(2, 1, 7, padding=3, bias=False)
        self.fc = nn.Linear(8, LABELS)

    def forward(self, images):
        x = self.stem(images)
        weights = self.channels(F.adaptive_avg_pool2d(x, 1)) + self.channels(
            F.adaptive_max_pool2d(x, 1))
        x = x * torch.sigmoid(weights)[..., None, None].expand_as(x)
        both = torch.cat([x.max(1, True)[0], x.mean(1, True)], 1)
        x = x * torch.sigmoid(self.places(both))
        return self.fc(x.mean((2, 3)))


class LearnedTokens(nn.Module):
    """Patches of an image between learned tokens, two of which are read, as
    DeiT's are."""

    def __init__(self, spread):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, 16))
        self.second = nn.Parameter(torch.randn(1, 1, 16))
        self.last = nn.Parameter(torch.randn(1, 2, 16))
        self.positions = nn.Parameter(torch.randn(1, 20, 16))
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, 0, batch_first=True)
        self.fc = nn.Linear(16, LABELS)
        self.spread = spread

    def forward(self, images):
        spread = lambda tokens: self.spread(tokens, images.shape[0])
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([spread(self.first), spread(self.second), x,
                       spread(self.last)], 1)
        x = self.layer(x + self.positions)
        return self.fc(x[:, 0] + x[:, 1])


class Queries(nn.Module):
    """Learned queries that read an image (DETR)."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.positions = nn.Parameter(torch.randn(1, 16, 16))
        self.queries = nn.Embedding(5, 16)
        self.layer = nn.TransformerDecoderLayer(16, 4, 32, 0, batch_first=True)
        self.fc = nn.Linear(16, LABELS)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        queries = self.queries.weight[None].expand(images.shape[0], -1, -1)
        return self.fc(self.layer(queries, x).mean(1))


def vit():
    """Torchvision's, a small one."""
    return torchvision.models.VisionTransformer(16, 4, 2, 4, 16, 32,
                                                num_classes=LABELS)


TORCHVISION = {
    "convnext_tiny": (torchvisions("convnext_tiny", stochastic_depth_prob=0,
                                   layer_scale=0.1), numbers(3, 64, 64)),
    "densenet121": (torchvisions("densenet121"), numbers(3, 64, 64)),
    "efficientnet_b0": (torchvisions("efficientnet_b0", dropout=0,
                                     stochastic_depth_prob=0),
                        numbers(3, 64, 64)),
    "mnasnet0_5": (torchvisions("mnasnet0_5", dropout=0), numbers(3, 64, 64)),
    "mobilenet_v3_small": (torchvisions("mobilenet_v3_small", dropout=0),
                           numbers(3, 64, 64)),
    "regnet_y_400mf": (torchvisions("regnet_y_400mf"), numbers(3, 64, 64)),
    "shufflenet_v2_x0_5": (torchvisions("shufflenet_v2_x0_5"),
                           numbers(3, 64, 64)),
    "squeezenet1_1": (torchvisions("squeezenet1_1", dropout=0),
                      numbers(3, 64, 64)),
}

MODELS = {
    "temporal": (Temporal, numbers(3, 32)),
    "audio": (Audio, numbers(1, 256)),
    "features": (Features, numbers(12)),
    "text": (Text, tokens),
    **{f"unet-{up}-{norm}": (functools.partial(UNet, up, norm),
                             numbers(3, 16, 16))
       for up, norm in (("transposed", "batch"), ("nearest", "batch"),
                        ("bilinear", "group"), ("corners", "instance"))},
    "generator": (Generator, numbers(12)),
    "waves": (Waves, numbers(3, 32)),
    "shuffled": (Shuffled, numbers(3, 8, 8)),
    "pools-uneven": (UnevenPools, numbers(3, 12, 12)),
    "shuffled-channels": (ShuffledChannels, numbers(3, 8, 8)),
    "pools": (Pools, numbers(3, 16, 16)),
    "normed": (Normed, numbers(3, 16, 16)),
    "depths": (Depths, tokens),
    "convnext": (ConvNext, numbers(3, 16, 16)),
    "cbam": (Cbam, numbers(3, 8, 8)),
    "tokens-expanded": (functools.partial(
        LearnedTokens, lambda tokens, n: tokens.expand(n, -1, -1)),
        numbers(3, 16, 16)),
    "tokens-repeated": (functools.partial(
        LearnedTokens, lambda tokens, n: tokens.repeat(n, 1, 1)),
        numbers(3, 16, 16)),
    "queries-of-images": (Queries, numbers(3, 16, 16)),
    "torchvision-vit": (vit, numbers(3, 16, 16)),
    **TORCHVISION,
}


def made(name):
    module, example = MODELS[name]
    return lambda: (module(), example())


for _name in MODELS:
    setattr(sys.modules[__name__], _name, made(_name))
