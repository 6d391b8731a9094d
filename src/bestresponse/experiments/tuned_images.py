"""The hyperparameters of distillation: images, and what keeps them images of their class."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br

from . import softmax
from .classification import Batch, accuracy
from .distilled_set import Recipe

_SHIFTS = (0, 0), (1, 1), (1, -1), (-1, 1), (-1, -1)
_SPREAD = 0.1


class Mixtures(nn.Module):
    """Means of the original images of a class, with tuned weights: any point between those images.

        x_k = Σ_n softmax(logits_k)_n x_n,   n over the images of the class of k

    Args:
        x, y: the original images [N, C, H, W] and their classes [N].
        labels: the class of each mean, [K], class by class.
        seed: the seed of the first logits, which differ a little: equal means of a class would stay equal.
    """

    def __init__(self, x: Tensor, y: Tensor, labels: Tensor, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.logits = x.shape[1:], nn.ParameterList()
        for label, count in enumerate(labels.bincount().tolist()):
            images = x[y == label].flatten(1)
            self.register_buffer(f"images{label}", images, persistent=False)
            self.logits.append(_SPREAD * torch.randn(count, len(images), generator=generator, dtype=x.dtype))

    def forward(self) -> Tensor:
        """The means, [K, C, H, W]."""
        means = [w.softmax(dim=1) @ x for w, x in zip(self.logits, self.buffers(), strict=True)]
        return torch.cat(means).view(-1, *self.shape)


class TunedImages(nn.Module):
    """Distilled images, and with a learned rate the learning rate of the training on them.

    Args:
        distilled: the images; with ``mixtures``, their differences from those.
        penalty: the factor of ½ ‖W‖² in the classifier's training loss.
        inner_steps: the number of steps of a training with a learned rate; None without one.
        mixtures: means of original images to which the tuned differences are added.
        limits: the lowest and the highest value of each channel, [C, 1, 1], of images with mixtures; those of others
            are the bounds of ``distilled``. None for no limits.
    """

    first: Tensor

    def __init__(
        self,
        distilled: br.hyperparameters.DistilledData,
        penalty: float,
        inner_steps: int | None = None,
        mixtures: Mixtures | None = None,
        limits: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.distilled, self.penalty, self.inner_steps = distilled, penalty, inner_steps
        self.mixtures, self._limits = mixtures, limits
        self.log_rate = None if inner_steps is None else nn.Parameter(torch.tensor(math.log(0.1)))
        self.register_buffer("first", distilled.inputs.detach().clone())

    def forward(self) -> tuple[Tensor, Tensor]:
        inputs, targets = self.distilled()
        return inputs if self.mixtures is None else self.mixtures() + inputs, targets

    @torch.no_grad()
    def project_(self) -> None:
        """Bring the images back within their limits, up to the rounding of the sum."""
        if self._limits is not None:
            inputs: Tensor = self()[0]
            self.distilled.inputs.add_(self._clamped(inputs) - inputs)

    @torch.no_grad()
    def finished(self) -> tuple[Tensor, Tensor]:
        """The images exactly within their limits, and their targets."""
        inputs, targets = self()
        return self._clamped(inputs), targets

    def _clamped(self, inputs: Tensor) -> Tensor:
        if self._limits is None:
            return inputs
        return inputs.clamp(*(limit.to(inputs.device) for limit in self._limits))

    def apart(self) -> Tensor:
        """The mean squared distance from the initial images, or from the mixtures."""
        return (self.distilled.inputs - self.first).square().mean()

    def rate(self) -> Tensor:
        """The tuned learning rate."""
        assert self.log_rate is not None
        return self.log_rate.exp()

    def recipe(self) -> Recipe:
        """The recipe for training a classifier on the present images."""
        if self.log_rate is None:
            return Recipe(self.penalty)
        return Recipe(self.penalty, self.inner_steps, self.rate().item())

    def test_accuracy(self, model: nn.Module, test: Batch) -> float:
        """The test accuracy of the present classifier; with a learned rate, of one trained from zero by the recipe."""
        if self.log_rate is None:
            return accuracy(model, test)
        inputs, targets = (part.detach() for part in self())
        w, _ = self.recipe().train(inputs, targets, int(model.get_parameter("bias").numel()))
        return softmax.accuracy(w, *test)


def reading_loss(networks: Sequence[nn.Module], x: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of networks that read images [N, C, H, W], as they are and shifted by a pixel."""
    shifted = torch.cat([x.roll(shift, (2, 3)) for shift in _SHIFTS])
    targets = labels.repeat(len(_SHIFTS))
    return torch.stack([F.cross_entropy(network(shifted), targets) for network in networks]).mean()
