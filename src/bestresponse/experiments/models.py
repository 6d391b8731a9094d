"""The networks of the paper's experiments, for images from 8×8 to 32×32."""

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError

Shape = tuple[int, int, int]


def make(name: str, shape: Shape, classes: int) -> nn.Module:
    """A network by name, for images of shape (channels, height, width); the paper's convolutional ones need 28×28."""
    if name in ("lenet", "alexnet", "resnet44") and shape[1] < 28:
        raise ArgumentError(
            f"{name} needs images of at least 28×28; got {shape[1]}×{shape[2]}. Use --data mnist or cifar10, "
            "or --model linear or mlp."
        )
    return _MODELS[name](shape, classes)


def linear(shape: Shape, classes: int) -> nn.Module:
    """Softmax regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def mlp(shape: Shape, classes: int) -> nn.Module:
    """One hidden layer as wide as the input, as in the paper's appendix."""
    n = math.prod(shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, classes))


def lenet(shape: Shape, classes: int) -> nn.Module:
    """LeNet-5 with ReLU and max pooling (LeCun et al., 1998); 28×28 images are padded to 32×32."""
    padding = 2 if shape[1] == 28 else 0
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


def alexnet(shape: Shape, classes: int) -> nn.Module:
    """AlexNet without dropout, with 57 million weights (Krizhevsky, Sutskever and Hinton, 2012).

    The stem has stride 1 and the last pooling is left out, so that 28×28 and 32×32 images give the 6×6 map that the
    classifier expects.
    """
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(6), nn.Flatten()),
        *(nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, classes)),
    )


def resnet44(shape: Shape, classes: int) -> nn.Module:
    """The 44-layer residual network for CIFAR (He et al., 2016): 3 stages of 7 blocks, 16 to 64 channels."""
    return _residual(shape, classes, (16, 32, 64), blocks=7)


def resnet18(shape: Shape, classes: int) -> nn.Module:
    """The 18-layer residual network (He et al., 2016) for CIFAR: a 3×3 stem of stride 1, 64 to 512 channels.

    It has 11,173,962 weights for colour images of ten classes.
    """
    return _residual(shape, classes, (64, 128, 256, 512), blocks=2, projection=True)


def resnet8(shape: Shape, classes: int) -> nn.Module:
    """Three residual blocks with 8 to 32 channels, which train in seconds."""
    return _residual(shape, classes, (8, 16, 32), blocks=1)


def _residual(
    shape: Shape, classes: int, widths: tuple[int, ...], blocks: int, projection: bool = False
) -> nn.Module:
    layers: list[nn.Module] = []
    channels = first = widths[0]
    for width in widths:
        for _ in range(blocks):
            layers.append(_Block(channels, width, projection))
            channels = width
    stem = (nn.Conv2d(shape[0], first, 3, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU())
    return nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class _Block(nn.Module):
    """Two 3×3 convolutions with a shortcut.

    If the width changes, the shortcut has no parameters (the paper's option A) or is a 1×1 convolution (option B).
    """

    def __init__(self, channels: int, width: int, projection: bool) -> None:
        super().__init__()
        self.stride = 1 if channels == width else 2
        self.project: nn.Module | None = None
        if projection and channels != width:
            convolution = nn.Conv2d(channels, width, 1, self.stride, bias=False)
            self.project = nn.Sequential(convolution, nn.BatchNorm2d(width))
        self.conv1 = nn.Conv2d(channels, width, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.project is not None:
            return F.relu(y + self.project(x))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        more = y.shape[1] - x.shape[1]
        if more:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, more // 2, more - more // 2))
        return F.relu(y + shortcut)


_MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    make.__name__: make for make in (linear, mlp, lenet, alexnet, resnet44, resnet18, resnet8)
}
