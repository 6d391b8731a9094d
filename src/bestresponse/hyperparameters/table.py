"""A table of weights for training examples, classes, sources or tokens."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    EvaluationError,
    require,
    require_flag,
    require_integer,
    require_number,
)
from .shrinkage import Shrinkage, as_shrinkage, rows_of_the_step

Positive = Literal["clamp", "softplus", "sigmoid", "softmax"]
# Above this value softplus is the identity to the precision of float64.
_LINEAR = 40.0


class Weights(nn.Module):
    """A weight for each of n examples, classes, sources or tokens, looked up by index.

        c_i = s_i ("clamp"),  softplus(s_i),  sigmoid(s_i),  or  n exp(s_i) / Σ_j exp(s_j) ("softmax")

    The table s is the hyperparameter. A training loss is ``(hyper(index) * losses).mean()`` with the losses of the
    single examples and the index of each. The gradient of a table is sparse: it holds the rows of the batch, and
    costs the same for ten thousand rows as for ten million. `torch.optim.SparseAdam` and SGD without momentum step
    on these rows only. Adam and momentum would also move all others, and `Tuner` refuses them. Softmax reads all
    weights, so its gradient is dense: it is for few weights, such as those of sources.

    Args:
        n: the number of weights.
        positive: how a weight is kept positive. With "clamp" the table holds the weights themselves, `Tuner` sets
            negative ones to zero after each step, and the hypergradient is the derivative with respect to the weights.
        initial: the first value of each weight: above 0, and below 1 for "sigmoid"; None means 0.5 for "sigmoid" and 1
            otherwise. With "softmax" all are 1.
        per: a tensor of integers with the group of each index, such as the source of each example: members of a group
            share one of the n weights. None means that an index is its own group.
        mean_one: whether to divide the weights of a call by their mean, so that they only weigh examples of a
            batch against one another.
        sparse: False gives dense gradients, for optimisers that need them.
        shrinkage: a strength, towards the initial weight; or a `Shrinkage`, whose ``towards`` is a weight. Only the
            rows of the last batch shrink. The mean of the table, ``Shrinkage(τ)``, reads all of it in each step.
        sharded: whether each of several processes has its own table, with n weights for its own examples. The
            hypergradient is the derivative of the mean loss of all ranks with respect to this table.
        dtype: the dtype of the table; None means torch's default.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is out of its range or of the wrong type.
    """

    def __init__(
        self,
        n: int,
        positive: Positive = "softplus",
        *,
        initial: float | None = None,
        per: Tensor | None = None,
        mean_one: bool = False,
        sparse: bool = True,
        shrinkage: float | Shrinkage | None = None,
        sharded: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_integer("Weights.n", n, 1)
        if positive not in ("clamp", "softplus", "sigmoid", "softmax"):
            raise ArgumentError(
                f'Weights.positive must be "clamp", "softplus", "sigmoid" or "softmax"; got {positive!r}.'
            )
        if positive == "softmax" and initial not in (None, 1.0):
            raise ArgumentError(f'Weights.initial must be 1 or None for "softmax"; got {initial!r}.')
        if dtype is not None and not dtype.is_floating_point:
            raise ArgumentTypeError(f"Weights.dtype must be a floating-point dtype; got {dtype}.")
        require_flag("Weights.mean_one", mean_one)
        require_flag("Weights.sparse", sparse)
        below = 1.0 if positive == "sigmoid" else math.inf
        initial = initial if initial is not None else 0.5 if positive == "sigmoid" else 1.0
        require_number("Weights.initial", initial)
        between = "between 0 and 1" if positive == "sigmoid" else "above 0 and finite"
        require(0.0 < initial < below, "Weights.initial", between, initial)
        self.positive, self.mean_one, self.sparse = positive, mean_one, sparse and positive != "softmax"
        self.sharded = sharded
        self.table = nn.Parameter(torch.full((n,), self._stored(initial), dtype=dtype))
        self.per: Tensor | None
        self.register_buffer("per", None if per is None else _groups(per, n))
        self.shrinkage = as_shrinkage("Weights.shrinkage", shrinkage, above=0.0, below=below)
        if self.shrinkage is not None and not isinstance(shrinkage, Shrinkage):
            self.shrinkage = replace(self.shrinkage, towards=initial)

    def forward(self, index: Tensor) -> Tensor:
        """The weights of these indices, in the shape of ``index``.

        Raises:
            EvaluationError: ``index`` is not a tensor of integers from 0 to n − 1.
        """
        rows = self._rows(index)
        if self.positive == "softmax":
            weights = self.values()[rows]
        else:
            stored = _lookup(self.table, rows) if self.sparse else self.table[rows]
            weights = self._positive(stored)
        return self._normalised(weights) if self.mean_one else weights

    def values(self) -> Tensor:
        """All n weights, without ``mean_one``."""
        if self.positive == "softmax":
            return len(self.table) * self.table.softmax(0)
        return self._positive(self.table)

    def readable(self, name: str) -> tuple[str, Callable[[Tensor], Tensor]] | None:
        """The weights in the history; with "softmax" the logits, since a weight depends on all of them."""
        if self.positive == "softmax":
            return name.replace("table", "logits"), lambda x: x
        return name.replace("table", "weights"), self._positive

    def shrink_(self, factor: float = 1.0) -> None:
        """Move the rows of the last step by the share ``factor`` · τ of their distance from the common value."""
        if self.shrinkage is not None:
            towards = self.shrinkage.towards
            target = None if towards is None else self._stored(towards)
            self.shrinkage.apply_({"table": self.table}, factor, target)

    @torch.no_grad()
    def project_(self) -> None:
        """Set negative weights to zero if ``positive`` is "clamp"; after a sparse step, those of its rows."""
        if self.positive == "clamp":
            rows = rows_of_the_step(self.table)
            if rows is None:
                self.table.clamp_(min=0.0)
            else:
                self.table[rows] = self.table[rows].clamp(min=0.0)

    def extra_repr(self) -> str:
        return f"{len(self.table):,}, {self.positive!r}, mean_one={self.mean_one}, sparse={self.sparse}"

    def _normalised(self, weights: Tensor) -> Tensor:
        mean = weights.mean()
        if (
            not torch._C._are_functorch_transforms_active()
            and weights.numel()
            and float(mean.detach()) == 0.0
        ):
            raise EvaluationError(
                "Weights with mean_one=True must not all be zero in a call; got zeros only. Use larger batches, a "
                'lower learning rate, or positive="softplus".'
            )
        return weights / mean

    def _positive(self, stored: Tensor) -> Tensor:
        if self.positive == "clamp":
            return stored
        return F.softplus(stored) if self.positive == "softplus" else stored.sigmoid()

    def _stored(self, weight: float) -> float:
        """The entry of the table for a weight."""
        if self.positive == "sigmoid":
            return math.log(weight / (1.0 - weight))
        if self.positive == "softplus":
            return weight if weight > _LINEAR else math.log(math.expm1(weight))
        return weight if self.positive == "clamp" else 0.0

    def _rows(self, index: Any) -> Tensor:
        limit = len(self.table) if self.per is None else len(self.per)
        plain = isinstance(index, Tensor) and not index.is_floating_point() and index.dtype != torch.bool
        if not plain:
            got = index.dtype if isinstance(index, Tensor) else type(index).__name__
            raise EvaluationError(
                f"Weights takes a tensor of integers, the index of each example; got {got}."
            )
        if index.numel() and not torch._C._are_functorch_transforms_active():
            low, high = int(index.min()), int(index.max())
            if low < 0 or high >= limit:
                raise EvaluationError(
                    f"Weights takes indices from 0 to {limit - 1}; got {low if low < 0 else high}."
                )
        return index.long() if self.per is None else self.per[index.long()]


class Indexed(Dataset[Any]):
    """A map-style data set whose items come with their index: ``(index, item)``, for a table of weights.

    Args:
        dataset: has ``__getitem__`` and ``__len__``.
    """

    def __init__(self, dataset: Any) -> None:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise ArgumentTypeError(
                f"Indexed.dataset must have __getitem__ and __len__; got {type(dataset).__name__}. Number "
                "the items of an iterable yourself."
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        number = index + len(self) if index < 0 else index
        return number, self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[int, Any]]:
        """The items of a batch at once, if the data set can."""
        fetch = getattr(self.dataset, "__getitems__", None)
        items = fetch(indices) if fetch else [self.dataset[i] for i in indices]
        return [(i + len(self) if i < 0 else i, item) for i, item in zip(indices, items, strict=True)]


def _groups(per: Any, n: int) -> Tensor:
    """The group of each index, checked."""
    if not isinstance(per, Tensor) or per.ndim != 1 or per.is_floating_point() or per.dtype == torch.bool:
        raise ArgumentTypeError(
            f"Weights.per must be a vector of integers, the group of each index; got {per!r:.80}."
        )
    if not per.numel() or int(per.min()) < 0 or int(per.max()) >= n:
        raise ArgumentError(f"Weights.per must hold groups from 0 to n − 1 = {n - 1}; got others, or none.")
    return per.detach().long().clone()


class _Lookup(torch.autograd.Function):
    """``table[rows]``, whose gradient is sparse unless it will be differentiated again."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = len(table)
        return table[rows]

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        (slope,) = slopes
        flat, values = rows.reshape(-1), slope.reshape(-1)
        if torch.is_grad_enabled() and slope.requires_grad:  # torch has no derivative of a sparse gradient
            return values.new_zeros(ctx.size).index_add(0, flat, values), None
        size = (ctx.size,)
        return torch.sparse_coo_tensor(flat[None], values, size, check_invariants=False).coalesce(), None


def _lookup(table: Tensor, rows: Tensor) -> Tensor:
    """``table[rows]`` with a sparse gradient where torch's transforms do not run."""
    if torch._C._are_functorch_transforms_active():
        return table[rows]
    return _Lookup.apply(table, rows)  # type: ignore[no-untyped-call, no-any-return]
