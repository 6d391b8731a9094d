"""Modules that change and weight training images, their losses, and pictures of the changes."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .classification import Batch, squared_norm

_SHOWN, _SAMPLES = 8, 64


class Learned(nn.Module):
    """The tuned networks: one that changes images, one that weights them, or both."""

    def __init__(self, augmenter: nn.Module | None, weights: nn.Module | None) -> None:
        super().__init__()
        self.augmenter, self.weights = augmenter, weights

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The changed images [N, C, H, W] and their weights [N]."""
        changed = x if self.augmenter is None else self.augmenter(x)
        return changed, x.new_ones(len(x)) if self.weights is None else self.weights(x)


@dataclass(frozen=True)
class Losses:
    """The training loss, in the parts that `GaussNewton` needs."""

    decay: float  # the weight decay of the model
    beside: bool  # whether to train on the original images too

    def predict(self, model: nn.Module, hyper: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [N, classes] and the weights of the examples [N]; 2 N of both with the original images."""
        x, weights = hyper(batch[0])
        if self.beside:
            x, weights = torch.cat([x, batch[0]]), weights.repeat(2)
        return model(x), weights

    def output_loss(self, outputs: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        """The weighted mean cross-entropy."""
        logits, weights = outputs
        losses = F.cross_entropy(logits, batch[1].repeat(len(logits) // len(batch[1])), reduction="none")
        return (weights * losses).mean()

    def rest(self, model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
        """½ decay ‖w‖²."""
        return 0.5 * self.decay * squared_norm(model)

    def train(self, model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
        """The training loss."""
        return self.output_loss(self.predict(model, hyper, batch), batch) + self.rest(model, hyper, batch)


def scores(channels: int) -> nn.Module:
    """A small network from images to scores, which are equal at first."""
    last = nn.Linear(16, 1)
    nn.init.zeros_(last.weight)
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), last),
    )


@torch.no_grad()
def changes(learned: nn.Module, x: Tensor, path: Path) -> dict[str, float]:
    """The root mean square change of the first images, and the noise between draws; saves images for the figure."""
    x = x[:_SHOWN]
    samples = torch.stack([learned(x)[0] for _ in range(_SAMPLES)])
    deviation = samples.std(dim=0)
    parts = {"original": x, "first": samples[0], "second": samples[1], "deviation": deviation}
    save_file({name: part.cpu().contiguous() for name, part in parts.items()}, path)
    change = (samples - x).square().mean().sqrt()
    return {"change": float(change), "noise": float(deviation.square().mean().sqrt())}


def show(axes: Axes, path: Path, title: str) -> None:
    """Show one picture with a line each of originals, two samples and deviations."""
    parts = load_file(path)
    x, deviation = parts["original"], parts["deviation"]
    low, high, largest = x.min(), x.max(), float(deviation.max())
    lines = [(parts[key] - low) / (high - low) for key in ("original", "first", "second")]
    lines.append(deviation / max(largest, 1e-12))
    framed = [torch.cat([F.pad(image, (1, 1, 1, 1), value=1.0) for image in line], 2) for line in lines]
    grid = torch.cat(framed, 1).clamp(0.0, 1.0)
    picture = grid[0] if len(grid) == 1 else grid.permute(1, 2, 0)
    axes.imshow(picture.numpy(), cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
    side = x.shape[2] + 2
    words = ("image", "sample", "sample", f"deviation\n(white: {largest:.2g})")
    axes.set_yticks([side * (i + 0.5) for i in range(4)], words, fontsize=8)
    axes.set_xticks([])
    axes.set_title(title, fontsize=10)
