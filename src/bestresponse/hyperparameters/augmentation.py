"""Learned augmentation: a small network that changes training images at random."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import EvaluationError, require, require_integer, require_number


class Augmenter(nn.Module):
    """Training images changed by a U-Net that also sees a channel of noise: x + Δ(x, z), z ~ N(0, 1).

    Its parameters are hyperparameters: use ``hyper(x)`` in the training loss and not in the validation loss.
    By default the last layer starts at zero, so the images do not change. The hypergradient cannot
    see noise there, only the mean of the features: to learn noise, start with a little of it (``initial``).
    With ``depth=2, width=8`` and three channels it has 6,659 parameters. It also augments in eval mode: only the
    losses decide where it is used.

    Args:
        channels: the number of channels of the images [N, C, H, W].
        depth: the number of levels; each level below the first has half the resolution and twice the channels.
        width: the number of channels of the first level.
        bound: the largest change of a value, b tanh(Δ / b); None leaves it free.
        initial: the standard deviation of the last layer's weights at the start; 0 is the identity.

    Raises:
        ArgumentError: an argument is out of its range.

    Reference: the paper's section 5.4; Ronneberger, Fischer and Brox (2015).
    """

    def __init__(
        self,
        channels: int = 3,
        depth: int = 2,
        width: int = 8,
        bound: float | None = None,
        initial: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value in (("channels", channels), ("depth", depth), ("width", width)):
            require_integer(f"Augmenter.{name}", value, 1)
        if bound is not None:
            require_number("Augmenter.bound", bound)
            require(0 < bound < math.inf, "Augmenter.bound", "positive and finite, or None", bound)
        require_number("Augmenter.initial", initial)
        require(0 <= initial < math.inf, "Augmenter.initial", "≥ 0 and finite", initial)
        self.channels, self.bound = channels, bound
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(
            _convolutions(before, after)
            for before, after in zip([channels + 1, *widths], widths, strict=False)
        )
        falling = list(reversed(widths))
        pairs = list(pairwise(falling))
        self.up = nn.ModuleList(nn.ConvTranspose2d(low, high, 2, stride=2) for low, high in pairs)
        self.merge = nn.ModuleList(_convolutions(2 * high, high) for _, high in pairs)
        self.last = nn.Conv2d(width, channels, 1)
        for layer in self.modules():
            # Torch's own initialisation shrinks the signal, noise most of all, by a third or more at each layer.
            if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.normal_(self.last.weight, std=initial)
        assert self.last.bias is not None
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The changed images [N, C, H, W], of any size.

        Raises:
            EvaluationError: x is not a batch of images with these channels.
        """
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise EvaluationError(
                f"Augmenter needs images [N, {self.channels}, H, W]; got {list(x.shape)}. Make it with their number "
                "of channels, and add a dimension to a single image."
            )
        z = torch.randn_like(x[:, :1])
        change = self._change(torch.cat([x, z], dim=1))
        return x + (change if self.bound is None else self.bound * torch.tanh(change / self.bound))

    def _change(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        step = 2 ** len(self.up)
        x = F.pad(x, (0, -width % step, 0, -height % step), mode="replicate")
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for up, merge, beside in zip(self.up, self.merge, reversed(kept[:-1]), strict=True):
            x = merge(torch.cat([up(x), beside], dim=1))
        change: Tensor = self.last(x)
        return change[:, :, :height, :width]

    def extra_repr(self) -> str:
        return f"bound={self.bound}"


def _convolutions(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU()
    )
