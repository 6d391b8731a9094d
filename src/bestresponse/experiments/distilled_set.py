"""A distilled set as files for other programs, the training from zero that tests it, and its pictures."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import ArgumentError
from . import plots, runs, softmax
from .classification import Batch
from .data import Images


@dataclass(frozen=True)
class Recipe:
    """How to train a classifier on the set.

    Attributes:
        penalty: factor of ½ ‖W‖², the bias included.
        steps, rate: number and learning rate of gradient steps from zero; None means training until convergence.
    """

    penalty: float
    steps: int | None = None
    rate: float | None = None

    def train(self, images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, float]:
        """Softmax weights trained from zero, [classes, D + 1] in float64, and the norm of their gradient."""
        images, labels = images.double(), labels if labels.ndim == 1 else labels.double()
        if self.steps is None or self.rate is None:
            return softmax.fit(images, labels, classes, self.penalty, steps=2000)
        x = softmax.extended(images)
        w = x.new_zeros(classes, x.shape[1])
        for _ in range(self.steps):
            w = w - self.rate * self._gradient(x, labels, w)
        return w, float(self._gradient(x, labels, w).norm())

    @torch.enable_grad()
    def _gradient(self, x: Tensor, labels: Tensor, w: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        return torch.autograd.grad(softmax.loss(x, labels, w, self.penalty), w)[0]


def save(folder: Path, batch: Batch, recipe: Recipe, data: str, images: Images) -> None:
    """Write ``distilled.safetensors`` (images [N, C, H, W], labels [N] or [N, classes]) and ``distilled.json``.

    Args:
        folder: the folder to write to.
        batch: float32 images in the classifier's input scale; and labels, int64 classes or float32 probabilities.
        recipe: how to train on them.
        data: name of the original set.
        images: the original set; its scale and class names are written too.
    """
    inputs, labels = (part.detach().cpu().contiguous() for part in batch)
    save_file({"images": inputs, "labels": labels}, folder / "distilled.safetensors")
    end = "until it converges." if recipe.steps is None else "by gradient descent."
    description = {
        "recipe": "Softmax regression on the flattened images, cross-entropy plus penalty/2 times the squared norm of "
        f"weights and bias, from zero {end}",
        **asdict(recipe),
        "data": data,
        "classes": images.names,
        "mean": images.mean,
        "deviation": images.deviation,
    }
    runs.write_whole(folder / "distilled.json", description)


def train_on(folder: Path) -> tuple[Tensor, float]:
    """A new classifier, trained from zero on the two files of a folder, and the norm of its gradient."""
    stored = load_file(folder / "distilled.safetensors")
    description = json.loads((folder / "distilled.json").read_text(encoding="utf-8"))
    recipe = Recipe(description["penalty"], description["steps"], description["rate"])
    return recipe.train(stored["images"], stored["labels"], len(description["classes"]))


def draw(folder: Path, grid: Path, strip: Path) -> None:
    """Draw the images in a grid with their classes, and the history of those of the first ten classes."""
    if not (folder / "snapshots.safetensors").is_file():
        raise ArgumentError(f"{folder} must hold distilled images; it has none. Has the run finished?")
    description = json.loads((folder / "distilled.json").read_text(encoding="utf-8"))
    names = [name.replace("_", " ") for name in description["classes"]]
    black = -description["mean"][0] / description["deviation"][0]
    images = load_file(folder / "distilled.safetensors")["images"]
    per_class = len(images) // len(names)
    across = 10
    down = math.ceil(len(images) / across)
    with plots.panels(grid, down, across, (10.0, 1.2 * down)) as axes:
        for panel in axes.flat:
            panel.axis("off")
        for number, (panel, image) in enumerate(zip(axes.flat, images, strict=False)):
            _show(panel, image, black)
            panel.set_title(names[number // per_class], fontsize=8, pad=2)
    snapshots = sorted(load_file(folder / "snapshots.safetensors").items(), key=lambda item: int(item[0]))
    shown = min(across, len(names))
    with plots.panels(strip, len(snapshots), shown, (10.0, 1.05 * len(snapshots))) as axes:
        for panel, name in zip(axes[0], names, strict=False):
            panel.set_title(name, fontsize=8, pad=2)
        for line, (step, snapshot) in zip(axes, snapshots, strict=True):
            for panel, image in zip(line, snapshot[::per_class], strict=True):
                _show(panel, image, black)
                panel.set(xticks=[], yticks=[])
            line[0].set_ylabel(f"step {step}", fontsize=9)


def _show(panel: Any, image: Tensor, black: float) -> None:
    """Show an image [C, H, W] with its values scaled from black to white.

    In a single channel black is that of the original images; zero is grey where an image is darker than that.
    """
    if image.shape[0] == 1:
        most = float(image.abs().max())
        low, high = -most, most
        if float(image.min()) >= black - 1e-5:
            low, high = black, float(image.max())
        panel.imshow(image[0].numpy(), cmap="gray", vmin=low, vmax=high)
    else:
        least = image.min()
        panel.imshow(((image - least) / (image.max() - least)).permute(1, 2, 0).numpy())
