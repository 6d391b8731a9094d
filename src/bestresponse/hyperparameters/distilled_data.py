"""A training set whose examples are hyperparameters."""

import math

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ArgumentTypeError, require, require_integer, require_number


class DistilledData(nn.Module):
    """A small training set that is itself tuned: every value of its inputs, and optionally its labels.

    A call without arguments returns the inputs and the targets, for a training loss that takes its batch
    from here, as in ``cross_entropy(model(inputs), targets)``. Soft labels are probabilities, the softmax of
    ``label_logits``. Hard labels are class numbers. Torch's cross-entropy accepts both.

    Args:
        inputs: the initial examples, [N, ...]; copied.
        labels: their classes, int64 [N].
        classes: the number of classes, for soft labels; None keeps hard labels.
        confidence: the initial probability of an example's own class in soft labels.
        bounds: the lowest and the highest input, which `project_` restores after a step: numbers, or tensors that
            broadcast against an example, such as [C, 1, 1]. None leaves the inputs free.

    Attributes:
        inputs: the parameter, [N, ...].
        label_logits: the parameter, [N, classes], or None.
        labels: as given.

    Raises:
        ArgumentError: the shapes do not fit, a label is not below ``classes``, ``confidence`` is not between
            1/classes and 1, or an initial input is outside the bounds.

    Reference: the paper's section 5.3; Wang, Zhu, Torralba and Efros (2018); soft labels, Bohdal, Yang and
    Hospedales (2020).
    """

    labels: Tensor
    low: Tensor | None
    high: Tensor | None

    def __init__(
        self,
        inputs: Tensor,
        labels: Tensor,
        classes: int | None = None,
        confidence: float = 0.9,
        bounds: tuple[float | Tensor, float | Tensor] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
            got = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
            raise ArgumentTypeError(f"DistilledData.inputs must be a tensor of floats; got {got}.")
        if not isinstance(labels, Tensor):
            raise ArgumentTypeError(f"DistilledData.labels must be a tensor; got {type(labels).__name__}.")
        if (
            inputs.ndim < 1
            or not len(inputs)
            or labels.shape != inputs.shape[:1]
            or labels.dtype != torch.int64
        ):
            raise ArgumentError(
                "DistilledData.labels must be one int64 class for each example; got "
                f"{labels.dtype} {list(labels.shape)} for inputs {list(inputs.shape)}."
            )
        if bounds is not None and not (
            isinstance(bounds, list | tuple)
            and len(bounds) == 2
            and all(isinstance(bound, int | float | Tensor) for bound in bounds)
        ):
            raise ArgumentTypeError(
                f"DistilledData.bounds must be two numbers or tensors, or None; got {bounds!r}."
            )
        self.inputs = nn.Parameter(inputs.detach().clone())
        self.register_buffer("labels", labels.detach().clone())
        limits = (torch.as_tensor(bound).to(inputs) for bound in bounds) if bounds else (None, None)
        for name, limit in zip(("low", "high"), limits, strict=True):
            self.register_buffer(name, limit, persistent=False)
        if bounds and not torch.equal(self.inputs, self._clamped()):
            raise ArgumentError(
                "DistilledData.inputs must be within the bounds; got inputs from "
                f"{float(inputs.min()):.4g} to {float(inputs.max()):.4g}. Clamp them, or widen the bounds."
            )
        self.label_logits: nn.Parameter | None = None
        if classes is None:
            return
        require_integer("DistilledData.classes", classes, 2)
        require(classes < 2**31, "DistilledData.classes", "below 2**31", classes)
        require_number("DistilledData.confidence", confidence)
        if not 0 <= int(labels.min()) <= int(labels.max()) < classes or not 1 / classes < confidence < 1:
            raise ArgumentError(
                "DistilledData needs labels from 0 to classes - 1, and 1/classes < confidence < 1; got labels "
                f"from {int(labels.min())} to {int(labels.max())}, classes={classes}, confidence={confidence!r}."
            )
        # softmax of (c, 0, …, 0) is ``confidence`` for c = log(confidence · (classes − 1) / (1 − confidence)).
        top = math.log(confidence * (classes - 1) / (1.0 - confidence))
        logits = top * nn.functional.one_hot(labels, classes)
        self.label_logits = nn.Parameter(logits.to(inputs.device, inputs.dtype))

    def forward(self) -> tuple[Tensor, Tensor]:
        """The inputs [N, ...], and the targets: int64 [N], or probabilities [N, classes]."""
        targets = self.labels if self.label_logits is None else self.label_logits.softmax(dim=1)
        return self.inputs, targets

    @torch.no_grad()
    def project_(self) -> None:
        """Restore the bounds of the inputs; call it after each step of the inputs (`Tuner` does)."""
        if self.low is not None:
            self.inputs.copy_(self._clamped())

    def _clamped(self) -> Tensor:
        return self.inputs.detach().clamp(self.low, self.high)

    def extra_repr(self) -> str:
        kind = "hard" if self.label_logits is None else "soft"
        return f"{list(self.inputs.shape)}, {kind} labels"
