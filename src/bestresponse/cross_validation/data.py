"""The batches of the folds of a data set."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..batches import Batches
from ..errors import ArgumentError, ArgumentTypeError, require_integer

Rows = tuple[Tensor, Tensor]


class FoldBatches:
    """Tuples of K batches, one for each fold: all rows of each fold, or a round of shuffled mini-batches.

    Args:
        data: tensors whose first dimension counts the examples, or a data set with ``__getitem__`` and ``__len__``.
        rows: the rows of each fold.
        batch_size: the examples in a batch of a fold; None means all of the fold's rows. All mini-batches have this
            size, so that folds can run batched; a round ends with the smallest fold, and leaves out the last few rows
            of its shuffled order.
        seed: the seed of the order, which is new in each round.
        collate: makes a batch from a list of examples of a data set.
    """

    def __init__(
        self,
        data: Any,
        rows: Sequence[Tensor],
        batch_size: int | None = None,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if batch_size is not None:
            require_integer("batch_size", batch_size, 1)
            smallest = min(map(len, rows))
            if smallest < batch_size:
                raise ArgumentError(
                    f"batch_size must be at most the number of rows of the smallest fold, {smallest}; got "
                    f"{batch_size}. Pass a smaller one, or None for all rows."
                )
        require_integer("seed", seed, 0)
        self.rows, self.batch_size = list(rows), batch_size
        self.generator = torch.Generator().manual_seed(seed)
        self._data, self._collate = data, collate
        self._all: tuple[Any, ...] | None = None

    def __len__(self) -> int:
        return 1 if self.batch_size is None else min(map(len, self.rows)) // self.batch_size

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        if self.batch_size is None:
            self._all = self._all or tuple(map(self._batch, self.rows))
            yield self._all
            return
        orders = [rows[torch.randperm(len(rows), generator=self.generator)] for rows in self.rows]
        for batches in zip(*(torch.split(order, self.batch_size) for order in orders), strict=False):
            if all(len(rows) == self.batch_size for rows in batches):
                yield tuple(map(self._batch, batches))

    def of_fold(self, number: int) -> Batches:
        """All rows of a fold in their order, in batches that count by their sizes."""
        pieces = torch.split(self.rows[number], self.batch_size or len(self.rows[number]))
        return Batches(map(self._batch, pieces), map(len, pieces))

    def _batch(self, rows: Tensor) -> Any:
        if isinstance(self._data, Tensor):
            return self._data[rows.to(self._data.device)]
        if isinstance(self._data, tuple | list):
            return tuple(x[rows.to(x.device)] for x in self._data)
        return self._collate([self._data[i] for i in rows.tolist()])


def fold_batches(
    data: Any,
    folds: Any = 5,
    *,
    targets: Any = None,
    groups: Any = None,
    batch_size: int | None = None,
    seed: int = 0,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> tuple[FoldBatches, FoldBatches]:
    """The training and the validation batches of K folds, for `Tuner.fit` on a problem of `Folds`.

    Args:
        data: a tensor, a tuple of tensors with one length, or a data set with ``__getitem__`` and ``__len__``. A batch
            of a fold is a tensor, a tuple of tensors, or what ``collate`` makes.
        folds: K, for blocks of rows in their order, as scikit-learn's ``KFold(K)`` makes them; any splitter of
            scikit-learn (``StratifiedKFold``, ``GroupKFold``, ``TimeSeriesSplit``); or pairs of training and
            validation rows.
        targets: what a splitter stratifies by, one for each example.
        groups: the group of each example, for splitters that keep groups together.
        batch_size: the examples in a batch of a fold; None means all.
        seed: the seed of the order of mini-batches.
        collate: makes a batch from a list of examples of a data set.

    Returns:
        Two collections of tuples of K batches: training, validation.

    Raises:
        ArgumentTypeError: ``data`` has no rows, or ``folds`` is not one of these.
        ArgumentError: there are more folds than examples, tensors of different lengths, or empty folds; or a row is
            outside the data, or serves a fold both for training and for validation.
    """
    rows = splits(folds, _length(data), targets, groups)
    train, val = zip(*rows, strict=True)
    return (
        FoldBatches(data, train, batch_size, seed, collate),
        FoldBatches(
            data, val, None if batch_size is None else min(batch_size, *map(len, val)), seed, collate
        ),
    )


def whole_batches(
    data: Any,
    batch_size: int | None = None,
    seed: int = 0,
    collate: Callable[[list[Any]], Any] = default_collate,
) -> Iterable[Any]:
    """Batches of all examples, for `Tuner.retrain`; the arguments are those of `fold_batches`."""
    return _Single(FoldBatches(data, [torch.arange(_length(data))], batch_size, seed, collate))


class _Single:
    """The batches of a single fold, without the tuple around each."""

    def __init__(self, batches: FoldBatches) -> None:
        self.dataset = batches  # a name under which a generator is found

    def __iter__(self) -> Iterator[Any]:
        return (batch for (batch,) in self.dataset)


def splits(folds: Any, length: int, targets: Any = None, groups: Any = None) -> list[Rows]:
    """The training and validation rows of each fold; the arguments are those of `fold_batches`."""
    if isinstance(folds, int) and not isinstance(folds, bool):
        require_integer("folds", folds, 2)
        if folds > length:
            raise ArgumentError(f"folds must be at most the number of examples, {length}; got {folds}.")
        parts = torch.tensor_split(torch.arange(length), folds)
        pairs: Iterable[Any] = [
            (torch.cat([*parts[:k], *parts[k + 1 :]]), part) for k, part in enumerate(parts)
        ]
    elif not isinstance(folds, str | Tensor) and callable(getattr(folds, "split", None)):
        given = (x.cpu().numpy() if isinstance(x, Tensor) else x for x in (targets, groups))
        pairs = folds.split([[0]] * length, *given)
    elif isinstance(folds, Iterable) and not isinstance(folds, str | Tensor):
        pairs = folds
    else:
        raise ArgumentTypeError(
            "folds must be a number of folds, a splitter of scikit-learn, or pairs of training and validation rows; "
            f"got {folds!r}."
        )
    rows = [_row_numbers(pair, length) for pair in pairs]
    if len(rows) < 2 or any(len(x) == 0 for pair in rows for x in pair):
        raise ArgumentError(
            f"folds must be at least two, each with training and validation rows; got {len(rows)} with "
            f"{[(len(a), len(b)) for a, b in rows][:5]} rows."
        )
    return rows


def _row_numbers(pair: Any, length: int) -> Rows:
    """The training and the validation rows of a fold as tensors."""
    try:
        train, val = (torch.as_tensor(rows) for rows in pair)
        kinds = [x.dtype if len(x) else torch.long for x in (train, val)]
        fits = all(x.ndim == 1 for x in (train, val)) and not any(
            k == torch.bool or k.is_floating_point or k.is_complex for k in kinds
        )
    except (TypeError, ValueError, RuntimeError):  # not two, or not numbers
        fits = False
    if not fits:
        raise ArgumentTypeError(
            "each fold must be a pair of training and validation rows, two lists of whole numbers; got "
            f"{pair!r}. Of a mask pass the rows: mask.nonzero().flatten()."
        )
    train, val = train.long().cpu(), val.long().cpu()
    outside = [i for x in (train, val) for i in x.tolist() if not 0 <= i < length]
    both = sorted(set(train.tolist()) & set(val.tolist()))
    if outside or both:
        raise ArgumentError(
            f"the rows of a fold must be from 0 to {length - 1}, and none both for training and for validation; got "
            f"{f'{outside[:5]} outside' if outside else f'{both[:5]} in both'}."
        )
    return train, val


def _length(data: Any) -> int:
    """The number of examples."""
    if isinstance(data, tuple | list) and all(isinstance(x, Tensor) and x.ndim for x in data) and data:
        lengths = {len(x) for x in data}
        if len(lengths) > 1:
            raise ArgumentError(
                f"the tensors of data must have one length; got {[len(x) for x in data]}. The first dimension counts "
                "the examples."
            )
        return lengths.pop()
    rowless = isinstance(data, tuple | list | Mapping) or (isinstance(data, Tensor) and not data.ndim)
    if rowless or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ArgumentTypeError(
            "data must be a tensor, a tuple of tensors, or a data set with __getitem__ and __len__; got "
            f"{type(data).__name__}."
        )
    return len(data)
