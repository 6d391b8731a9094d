"""A distilled set as files that another program can train on, and the training from zero that judges it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import runs, softmax


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
        loss = F.cross_entropy(x @ w.T, labels) + self.penalty / 2 * w.square().sum()
        return torch.autograd.grad(loss, w)[0]


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
