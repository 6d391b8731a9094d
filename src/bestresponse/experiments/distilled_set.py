"""A distilled set as files that another program can train on, the training from zero that judges it, its pictures."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..errors import ArgumentError
from . import plots, runs, softmax


@dataclass(frozen=True)
class Recipe:
    """How a classifier is trained on the set.

    Attributes:
        penalty: of ½ ‖W‖², the bias included.
        steps, rate: of gradient descent from zero; None trains until it converges.
    """

    penalty: float
    steps: int | None = None
    rate: float | None = None

    def train(self, images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, float]:
        """A softmax regression trained from zero, [classes, D + 1] in float64, and the norm of its gradient."""
        images, labels = images.double(), labels if labels.ndim == 1 else labels.double()
        if self.steps is None or self.rate is None:
            return softmax.fit(images, labels, classes, self.penalty, steps=2000)
        x = softmax.extended(images)
        w = x.new_zeros(classes, x.shape[1])
        for _ in range(self.steps):
            w = w - self.rate * self._gradient(x, labels, w)
        return w, float(self._gradient(x, labels, w).norm())

    def _gradient(self, x: Tensor, labels: Tensor, w: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        return torch.autograd.grad(softmax.loss(x, labels, w, self.penalty), w)[0]


def save(folder: Path, images: Tensor, labels: Tensor, recipe: Recipe, **more: Any) -> None:
    """Write ``distilled.safetensors`` (images [N, C, H, W], labels [N] or [N, classes]) and ``distilled.json``.

    Args:
        folder: where.
        images: float32, in the classifier's input scale.
        labels: int64, or float32 probabilities.
        recipe: how to train on them.
        more: what else another program needs, as the scale's mean and deviation.
    """
    save_file(
        {"images": images.detach().cpu().contiguous(), "labels": labels.detach().cpu().contiguous()},
        folder / "distilled.safetensors",
    )
    text = (
        "Softmax regression on the flattened images, cross-entropy plus penalty/2 times the squared norm of "
        "weights and bias, from zero"
        + (" until it converges." if recipe.steps is None else " by gradient descent.")
    )
    runs.write_whole(
        folder / "distilled.json",
        {"recipe": text, "penalty": recipe.penalty, "steps": recipe.steps, "rate": recipe.rate, **more},
    )


def train_on(folder: Path) -> tuple[Tensor, float]:
    """A new classifier, trained from zero on what the folder's two files say, and the norm of its gradient."""
    stored = load_file(folder / "distilled.safetensors")
    told = json.loads((folder / "distilled.json").read_text(encoding="utf-8"))
    recipe = Recipe(told["penalty"], told["steps"], told["rate"])
    return recipe.train(stored["images"], stored["labels"], len(told["classes"]))


def draw(folder: Path, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[Path]:
    """The images in a grid with their classes, and those of the first ten classes as they came about."""
    if not (folder / "snapshots.safetensors").is_file():
        raise ArgumentError(f"{folder} must hold distilled images to draw; it has none. Has the run ended?")
    names = json.loads((folder / "distilled.json").read_text(encoding="utf-8"))["classes"]
    images = load_file(folder / "distilled.safetensors")["images"]
    per_class = len(images) // len(names)
    across = 10
    down = math.ceil(len(images) / across)
    paths = [folder / "distilled.png", folder / "iterations.png"]
    with plots.panels(paths[0], down, across, (10.0, 1.2 * down)) as axes:
        for panel in axes.flat:
            panel.axis("off")
        for number, (panel, image) in enumerate(zip(axes.flat, images, strict=False)):
            _show(panel, image)
            panel.set_title(names[number // per_class].replace("_", " "), fontsize=8, pad=2)
    snapshots = sorted(load_file(folder / "snapshots.safetensors").items(), key=lambda item: int(item[0]))
    shown = min(across, len(names))
    with plots.panels(paths[1], len(snapshots), shown, (10.0, 1.05 * len(snapshots))) as axes:
        for panel, name in zip(axes[0], names, strict=False):
            panel.set_title(name.replace("_", " "), fontsize=8, pad=2)
        for line, (step, snapshot) in zip(axes, snapshots, strict=True):
            for panel, image in zip(line, snapshot[::per_class], strict=True):
                _show(panel, image)
                panel.set_xticks([])
                panel.set_yticks([])
            line[0].set_ylabel(f"step {step}", fontsize=9)
    return paths


def _show(panel: Any, image: Tensor) -> None:
    """One image [C, H, W], its values spread from black to white; a single channel with zero as grey."""
    if image.shape[0] == 1:
        most = float(image.abs().max())
        panel.imshow(image[0].numpy(), cmap="gray", vmin=-most, vmax=most)
    else:
        low, high = image.min(), image.max()
        panel.imshow(((image - low) / (high - low)).permute(1, 2, 0).numpy())
