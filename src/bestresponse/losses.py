"""Losses of outputs whose Hessian is known in closed form, for `GaussNewton`."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import ArgumentError, ArgumentTypeError


class CrossEntropy:
    """The mean cross-entropy of logits, with its output Hessian in closed form.

        ℓ(z) = (1/N) Σ_n −Σ_c q_nc log p_nc,   p = softmax(z),   H u = (1/N) (p ⊙ u − p (p · u))

    It is ``torch.nn.functional.cross_entropy`` as a loss (outputs, batch) -> scalar for
    `GaussNewton`. The closed form needs only the softmax, whereas a derivative by autograd keeps several
    tensors of the size of the logits: it is meant for large vocabularies.

    Args:
        targets: batch -> class indices int64 [...], for logits [..., C] (the classes last).
        ignore_index: positions with this target do not count.
        label_smoothing: between 0 and 1; it changes q but not the Hessian.

    Raises:
        ArgumentTypeError: ``targets`` is not a function.
        ArgumentError: ``label_smoothing`` is out of its range, or logits and targets do not fit.

    Reference: Schraudolph (2002), section 3.
    """

    def __init__(
        self, targets: Callable[[Any], Tensor], ignore_index: int = -100, label_smoothing: float = 0.0
    ) -> None:
        if not callable(targets):
            raise ArgumentTypeError(
                f"CrossEntropy.targets must be a function batch -> class indices; got {targets!r}. "
                "For pairs of inputs and targets: CrossEntropy(lambda batch: batch[1])."
            )
        if not isinstance(label_smoothing, int | float) or not 0.0 <= label_smoothing <= 1.0:
            raise ArgumentError(
                f"CrossEntropy.label_smoothing must be between 0 and 1; got {label_smoothing}."
            )
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int) or abs(ignore_index) >= 2**63:
            raise ArgumentTypeError(f"CrossEntropy.ignore_index must be an integer; got {ignore_index!r}.")
        self.targets, self.ignore_index, self.label_smoothing = targets, ignore_index, label_smoothing

    def __call__(self, outputs: Tensor, batch: Any) -> Tensor:
        """The loss of logits [..., C]."""
        targets = self._targets(outputs, batch)
        return F.cross_entropy(
            outputs.reshape(-1, outputs.shape[-1]),
            targets.reshape(-1),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )

    @torch.no_grad()
    def output_hessian(self, outputs: Tensor, batch: Any) -> Callable[[Tensor], Tensor]:
        """The map u ↦ H u at logits [..., C], for u of their shape."""
        counted = self._targets(outputs, batch) != self.ignore_index
        share = (counted.to(outputs.dtype) / counted.sum()).unsqueeze(-1)
        p = outputs.softmax(-1)

        def product(u: Tensor) -> Tensor:
            weighed = p * u
            return weighed.sub_(p * weighed.sum(-1, keepdim=True)).mul_(share)

        return product

    @torch.no_grad()
    def output_root(self, outputs: Tensor, batch: Any) -> Callable[[Tensor], Tensor]:
        """The map ξ ↦ S ξ with S Sᵀ = H at logits [..., C]: a row √(1/N) (√p ⊙ ξ − p (√p · ξ))."""
        counted = self._targets(outputs, batch) != self.ignore_index
        share = (counted.to(outputs.dtype) / counted.sum()).sqrt().unsqueeze(-1)
        p = outputs.softmax(-1)

        def product(xi: Tensor) -> Tensor:
            weighed = p.sqrt() * xi
            return weighed.sub_(p * weighed.sum(-1, keepdim=True)).mul_(share)

        return product

    def _targets(self, outputs: Tensor, batch: Any) -> Tensor:
        if not isinstance(outputs, Tensor) or outputs.ndim == 0:
            raise ArgumentTypeError(
                f"CrossEntropy needs logits as one tensor [..., C]; got {type(outputs).__name__}. Let predict return "
                "the logits alone."
            )
        targets = self.targets(batch)
        if not isinstance(targets, Tensor) or targets.dtype != torch.int64:
            got = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
            raise ArgumentTypeError(
                f"CrossEntropy.targets must return class indices, a tensor of int64; got {got}. Convert with .long()."
            )
        if targets.shape != outputs.shape[:-1]:
            raise ArgumentError(
                f"CrossEntropy needs one class index for each row of logits, of shape {list(outputs.shape[:-1])} "
                f"for logits {list(outputs.shape)}; got targets of shape {list(targets.shape)}. Put the classes last."
            )
        return targets

    def __repr__(self) -> str:
        return f"CrossEntropy(ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing})"
