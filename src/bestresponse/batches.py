"""Several batches that can replace a single batch."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from .errors import ArgumentError, ArgumentTypeError


class Batches:
    """Several batches that can replace a single batch: the weighted mean of their losses.

        L(w, λ) = Σ_i c_i L_i(w, λ),   c = weights / Σ weights

    Hypergradients, curvature and mixed term are then those of the mean, to rounding. With micro-batches
    and their sizes as weights, they are those of the one large batch. Each batch has its own dropout masks. As a
    training batch of `Tuner`, its weight steps accumulate gradients.

    Args:
        iterable: the batches; they are kept in a list.
        weights: numbers ≥ 0, one for each batch; None gives equal weights. Pass the sizes if they differ (the
            numbers of targets that count, if a loss ignores some).
        recompute: whether the curvature keeps the graphs of all batches (False: the memory of the one large
            batch) or rebuilds the graph of one at a time for each product (True: the memory of one
            batch, at the cost of one more training gradient for each product).

    Raises:
        ArgumentError: there is no batch, or the weights do not fit.
    """

    def __init__(
        self, iterable: Iterable[Any], weights: Iterable[float] | None = None, recompute: bool = False
    ) -> None:
        if not isinstance(iterable, Iterable) or isinstance(iterable, Tensor | Mapping | str):
            raise ArgumentTypeError(
                f"Batches takes a collection of batches; got {type(iterable).__name__}. Pass a list of them."
            )
        self.batches: Sequence[Any] = list(iterable)
        self.recompute = recompute
        if not self.batches:
            raise ArgumentError("Batches must hold at least one batch; got none.")
        if any(isinstance(batch, Batches) for batch in self.batches):
            raise ArgumentTypeError(
                "Batches must hold plain batches; got Batches inside. Pass one flat list."
            )
        numbers = _normalised(weights, len(self.batches))
        # A batch of weight zero would cost as much as any other, and may not be a valid batch.
        self.batches = [batch for batch, weight in zip(self.batches, numbers, strict=True) if weight]
        self.weights = [weight for weight in numbers if weight]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __repr__(self) -> str:
        return f"Batches({len(self)} batches, recompute={self.recompute})"


def weighted(batch: Any) -> list[tuple[Any, float]]:
    """The plain batches of a batch, each with its weight."""
    if isinstance(batch, Batches):
        return list(zip(batch.batches, batch.weights, strict=True))
    return [(batch, 1.0)]


def _normalised(weights: Iterable[float] | None, count: int) -> list[float]:
    if weights is None:
        return [1.0 / count] * count
    try:
        numbers = [float(x) for x in weights]
    except (TypeError, ValueError):
        numbers = []
    total = math.fsum(numbers)
    if len(numbers) != count or not all(x >= 0 for x in numbers) or not 0.0 < total < math.inf:
        raise ArgumentError(
            f"Batches.weights must be {count} numbers ≥ 0, not all zero, one for each batch; got {weights!r}."
        )
    return [x / total for x in numbers]
