"""Several batches that can replace a single batch."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import ArgumentError, ArgumentTypeError, BestResponseWarning, require_flag

_PLAIN = (bool, int, float, complex, str, bytes)


class Batches:
    """Several batches that can replace a single batch: the weighted mean of their losses.

        L(w, λ) = Σ_i c_i L_i(w, λ),   c = weights / Σ weights

    Hypergradients, curvature and mixed term are then those of the mean, to rounding. With micro-batches
    and their sizes as weights, they are those of the one large batch. Each batch has its own dropout masks. As a
    training batch of `Tuner`, its weight steps accumulate gradients.

    Args:
        iterable: the batches; they are kept in a list.
        weights: numbers ≥ 0, one for each batch; None gives equal weights, with a warning if the batches are known to
            differ in size. Pass the sizes then (the numbers of targets that count, if a loss ignores some).
        recompute: whether the curvature keeps the graphs of all batches (False: the memory of the one large
            batch) or rebuilds the graph of one at a time for each product (True: the memory of one
            batch, at the cost of up to a training gradient more for each product: the last batch of a product is the
            first of the next, and with `GaussNewton` the graph costs little more than a forward pass).

    Attributes:
        weights: c.
        total: Σ weights, by which these batches count among those of other processes; None without weights.

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
        require_flag("Batches.recompute", recompute)
        self.recompute = recompute
        if not self.batches:
            raise ArgumentError("Batches must hold at least one batch; got none.")
        if any(isinstance(batch, Batches) for batch in self.batches):
            raise ArgumentTypeError(
                "Batches must hold plain batches; got Batches inside. Pass one flat list."
            )
        if weights is None:
            _warn_of_sizes(self.batches)
        numbers, self.total = _normalised(weights, len(self.batches))
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


def mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A batch with a function applied to each of its tensors, in tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        return function(batch)
    return _rebuilt(batch, lambda part: mapped(part, function))


def length_of(batch: Any) -> int | None:
    """The number of examples of a plain batch; None if it cannot be known.

    It is the one length of the batch's tensors and of its lists and tuples of numbers or texts.
    """
    lengths: set[int] = set()
    try:
        _measure(batch, lengths)
    except Exception:  # collections and tensors that cannot be split, for any reason
        return None
    return lengths.pop() if len(lengths) == 1 else None


def rows_of(batch: Any, rows: slice) -> Any:
    """Some of a plain batch's examples; numbers, texts and tensors without dimensions stay whole."""
    if isinstance(batch, Tensor):
        return batch[rows] if batch.ndim else batch
    return batch[rows] if _is_column(batch) else _rebuilt(batch, lambda part: rows_of(part, rows))


def halves_of(batch: Any) -> list[tuple[Any, float]]:
    """Two halves of a batch, each with its share: every second example, or every second one of several batches.

    Raises:
        ArgumentError: it has fewer than two examples, or cannot be divided.
    """
    if isinstance(batch, Batches) and len(batch) > 1:
        sums = [math.fsum(batch.weights[begin::2]) for begin in (0, 1)]
        parts = [_similar(batch, batch.batches[i::2], batch.weights[i::2]) for i in (0, 1)]
        return list(zip(parts, sums, strict=True))
    (plain, _) = weighted(batch)[0]
    length = length_of(plain) or 0
    if length < 2:
        raise ArgumentError(
            "a validation batch that is divided into halves must be a tensor, or a tuple, list or dict of tensors (and "
            f"lists of numbers or texts) of one length ≥ 2; got {type(plain).__name__}"
            f"{'' if length_of(plain) is None else f' of length {length}'}. Pass "
            "Batches([half, half]) instead."
        )
    first = (length + 1) // 2 / length
    return [
        (rows_of(plain, slice(0, None, 2)), first),
        (rows_of(plain, slice(1, None, 2)), 1.0 - first),
    ]


def _rebuilt(batch: Any, function: Callable[[Any], Any]) -> Any:
    """A collection with a function applied to each of its parts; anything else as it is."""
    if isinstance(batch, Batches):
        return _similar(batch, map(function, batch), batch.weights)
    if isinstance(batch, dict):
        return type(batch)({k: function(v) for k, v in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(function, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(function, batch))
    return batch


def _similar(batch: Batches, pieces: Iterable[Any], weights: Sequence[float]) -> Batches:
    """Other pieces with some of the weights."""
    similar = Batches(pieces, weights, batch.recompute)
    similar.total = None if batch.total is None else batch.total * math.fsum(weights)
    return similar


def _is_column(batch: Any) -> bool:
    """Whether it is a list or tuple of numbers or texts, one for each example."""
    return type(batch) in (list, tuple) and bool(batch) and all(isinstance(x, _PLAIN) for x in batch)


def _warn_of_sizes(batches: Sequence[Any]) -> None:
    """Warn if batches of different sizes get equal weights, which is not the mean over their examples."""
    sizes = {size for size in map(length_of, batches) if size is not None}
    if len(sizes) > 1:
        warnings.warn(
            f"Batches gives equal weights to batches of {min(sizes)} to {max(sizes)} examples. For the mean over all "
            "examples pass weights=sizes; for equal weights pass weights=[1] * len(batches).",
            BestResponseWarning,
            stacklevel=3,
        )


def _measure(batch: Any, lengths: set[int]) -> None:
    """Collect the lengths; raise if there is more than plain collections, plain tensors, numbers and texts."""
    if isinstance(batch, Tensor):
        if type(batch) is not Tensor or batch.layout != torch.strided or batch.is_nested:
            raise TypeError
        lengths.update([len(batch)] if batch.ndim else [])
    elif _is_column(batch):
        lengths.add(len(batch))
    elif isinstance(batch, dict | list | tuple):
        if type(batch) not in (dict, list, tuple) and not hasattr(batch, "_fields"):
            raise TypeError
        for value in batch.values() if isinstance(batch, dict) else batch:
            _measure(value, lengths)
    elif batch is not None and not isinstance(batch, _PLAIN):
        raise TypeError


def _normalised(weights: Iterable[float] | None, count: int) -> tuple[list[float], float | None]:
    if weights is None:
        return [1.0 / count] * count, None
    try:
        numbers = [float(x) for x in weights]
    except (TypeError, ValueError):
        numbers = []
    total = math.fsum(numbers)
    if len(numbers) != count or not all(x >= 0 for x in numbers) or not 0.0 < total < math.inf:
        raise ArgumentError(
            f"Batches.weights must be {count} numbers ≥ 0, not all zero, one for each batch; got {weights!r}."
        )
    return [x / total for x in numbers], total
