"""Regularisers of a convolutional network as hyperparameters: decay, label smoothing and augmentation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hyperparameters import Shrinkage, WeightDecay

# Log strengths at the start, and their ranges: a strength of 1 is a usual augmentation.
_START, _LOW, _HIGH = math.log(0.1), math.log(0.01), math.log(3.0)
_KINDS = 5  # shift, rotation, zoom, brightness and noise


class ImageRegularisers(nn.Module):
    """A decay, label smoothing, and the strength of a random augmentation, for a training loss.

    Args:
        decay: the decay of the weights.
        few: a module with one smoothing and one strength, at which this one begins.
        classes: the number of classes for a smoothing of each class and a strength of each kind of augmentation; None
            means one smoothing and one strength.
        shrinkage: the strength with which smoothings and strengths are drawn to their means.
    """

    def __init__(
        self,
        decay: WeightDecay,
        few: "ImageRegularisers | None" = None,
        classes: int | None = None,
        shrinkage: float = 0.0,
    ) -> None:
        super().__init__()
        self.decay = decay
        smoothing, strength = (-4.0, _START) if few is None else few.values()
        self.smoothing = nn.Parameter(torch.full((classes or 1,), smoothing))
        self.strength = nn.Parameter(torch.full((_KINDS if classes else 1,), strength))
        self._shrinkage = Shrinkage(shrinkage)

    def values(self) -> tuple[float, float]:
        """The one smoothing and the one strength, as they are stored."""
        return float(self.smoothing.detach()), float(self.strength.detach())

    def train_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The cross-entropy of augmented images with smoothed labels, plus the decay."""
        x, y = batch
        logs = F.log_softmax(model(augmented(x, self.strength.exp().expand(_KINDS))), dim=1)
        smoothing = self.smoothing.sigmoid().expand(logs.shape[1])[y]
        fit = (1.0 - smoothing) * logs.gather(1, y[:, None])[:, 0] + smoothing * logs.mean(dim=1)
        penalty: Tensor = self.decay(model)
        return penalty - fit.mean()

    def shrink_(self, factor: float = 1.0) -> None:
        """Draw smoothings and strengths to their means."""
        parameters = {"smoothing": self.smoothing, "strength": self.strength}
        self._shrinkage.apply_(parameters, factor)

    @torch.no_grad()
    def project_(self) -> None:
        """Restore the bounds."""
        self.smoothing.clamp_(-8.0, 0.0)
        self.strength.clamp_(_LOW, _HIGH)

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The ranges of a search."""
        return {"smoothing": (-8.0, 0.0), "strength": (_LOW, _HIGH)}


def augmented(x: Tensor, strengths: Tensor) -> Tensor:
    """Images [N, C, H, W] shifted, rotated, zoomed, made brighter and noisy at random, with a strength for each."""
    shift, rotation, zoom, brightness, noise = strengths.unbind()
    z = torch.randn(5, len(x), dtype=x.dtype, device=x.device)
    angle, scale = 0.3 * rotation * z[0], (0.2 * zoom * z[1]).exp()
    cos, sin = scale * angle.cos(), scale * angle.sin()
    rows = [torch.stack([cos, -sin, 0.2 * shift * z[2]], 1), torch.stack([sin, cos, 0.2 * shift * z[3]], 1)]
    grid = F.affine_grid(torch.stack(rows, dim=1), list(x.shape), align_corners=False)
    moved = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    changed: Tensor = moved + 0.5 * brightness * z[4][:, None, None, None] + 0.3 * noise * torch.randn_like(x)
    return changed
