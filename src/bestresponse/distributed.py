"""Means over the processes of a group: each derivative and each loss that leaves autograd passes through here.

    L(w, λ) = Σ_r n_r L_r(w, λ) / Σ_r n_r,   L_r the loss of rank r on its own batch of n_r examples

Weights and hyperparameters are the same on all ranks. A product with the curvature and a mixed term are linear in L,
so each is the mean of those of the ranks, and a solver on any rank sees the matrix of the joined batch. All ranks get
the same bits, so they take the same branches.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import _tree, errors
from .batches import Batches
from .errors import Error, EvaluationError, named

T = TypeVar("T")

# The largest relative difference of a tensor's sums that counts as equal.
_EQUAL = 1e-5


class Group:
    """The processes whose losses a problem takes the mean of; one process alone communicates nothing.

    Args:
        handle: a group of torch.distributed; None for one process alone.
        device: where numbers lie on the way to other ranks.
        batch_size: the number of examples of a batch, by which it counts. None counts `Batches` with weights by their
            sum, and everything else equally.
        sparse: the identities of the parameters with sparse gradients.
        own: the identities of the hyperparameters that belong to one rank: tables of its own examples.

    Attributes:
        batch_size: as given.
        own: as given.
        rank, size: the number of this process in the group, and the number of processes.
        averages: whether each process has its own derivatives, of which the means are taken.
        sharded: whether each process has a part of the weights.
        calls, bytes: the number of reductions so far, and the bytes of their buffers.
    """

    def __init__(
        self,
        handle: Any = None,
        device: torch.device | None = None,
        batch_size: Callable[[Any], float] | None = None,
        sparse: Collection[int] = (),
        own: Collection[int] = (),
    ) -> None:
        self.handle, self._device = handle, device
        self.batch_size, self.own, self._apart = batch_size, frozenset(own), frozenset({*sparse, *own})
        self.rank = 0 if handle is None else torch.distributed.get_rank(handle)
        self.size = 1 if handle is None else torch.distributed.get_world_size(handle)
        self.averages, self.sharded = self.size > 1, False
        self.calls = self.bytes = 0
        self._layout: Any = None

    def __deepcopy__(self, memo: Any) -> "Group":
        return self  # a process group cannot be copied

    def reading(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """A context in which losses read the parameters of these modules."""
        return nullcontext()

    @contextmanager
    def differentiating(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Let DistributedDataParallel inside a model call its module only, since the means are taken here."""
        replicas = [m for m in modules if is_replica(m)]
        for replica in replicas:
            vars(replica)["forward"] = replica.module
        try:
            yield
        finally:
            for replica in replicas:
                vars(replica).pop("forward", None)

    def joined(self, loss: Tensor) -> Tensor:
        """A loss as it leaves its computation; its mean is taken with its derivatives."""
        return loss

    def size_of(self, batch: Any) -> float:
        """The number of examples by which a batch counts among those of the other ranks."""
        if isinstance(batch, Batches) and batch.total is not None:
            return batch.total
        if self.batch_size is None:
            return 1.0
        pieces = batch if isinstance(batch, Batches) else [batch]
        size = sum(float(self.batch_size(piece)) for piece in pieces)
        if not 0.0 < size < float("inf"):
            raise errors.ArgumentError(
                f"Problem.batch_size must return a number above zero for each batch; got {size}. Give each rank at "
                "least one example of every batch."
            )
        return size

    def mean(
        self,
        compute: Callable[[], Sequence[Tensor | None]],
        like: Sequence[Tensor],
        batch: Any = None,
    ) -> list[Tensor | None]:
        """The mean over the ranks of the tensors that ``compute`` returns, which have the shapes of ``like``.

        It is one reduction of one flat buffer, in float32 at least. A tensor is None where it is None on all ranks. If
        ``compute`` fails on a rank, all ranks raise; it must not communicate itself.

        Args:
            compute: returns the tensors of this rank.
            like: tensors with their shapes, dtypes and devices.
            batch: the batch that they come from, which counts by its size; None counts all ranks equally.
        """
        if not self.averages:
            return list(compute())
        own: Sequence[Tensor | None] = [None] * len(like)
        error, size = None, 0.0
        try:
            own, size = compute(), 1.0 if batch is None else self.size_of(batch)
        except Exception as caught:
            error = caught
        dense = [i for i, x in enumerate(like) if id(x) not in self._apart]
        numbers = [float(error is not None), size, *(float(x is not None) for x in own)]
        flat = self._flat(numbers, [own[i] for i in dense], [like[i] for i in dense], size)
        self.reduce(flat)
        failed, total, *counts = flat[: len(numbers)].tolist()
        if failed:
            raise self._error(error)
        result: list[Tensor | None] = [None] * len(like)
        values = flat[len(numbers) :].div_(total)
        pieces = _tree.unflatten(values, {str(i): like[i] for i in dense})
        for index, piece in pieces.items():
            result[int(index)] = piece if counts[int(index)] else None
        for i in set(range(len(like))) - set(dense):
            part, x, share = own[i], like[i], size / total
            if counts[i] and id(x) in self.own:
                result[i] = torch.zeros_like(x) if part is None else part * share
            elif counts[i]:
                result[i] = self._sparse_mean(part, x, share)
        return result

    def _sparse_mean(self, own: Tensor | None, like: Tensor, share: float) -> Tensor:
        """The mean of sparse gradients: the rows of all ranks, each once."""
        part = None if own is None else (own * share).to_sparse().coalesce()
        rows = None if part is None else (part.indices().cpu(), part.values().cpu())
        found = [x for x in self.gather(rows) if x is not None]
        indices, values = (torch.cat(x, dim=-1).to(like.device) for x in zip(*found, strict=True))
        return torch.sparse_coo_tensor(indices, values, like.shape, check_invariants=False).coalesce()

    def mean_of(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The means over the ranks of numbers, each counting equally."""
        found = self.gather(dict(numbers))
        return {name: math.fsum(each[name] for each in found) / self.size for name in numbers}

    def share(self, one: Any, other: Any, known: float) -> float:
        """The share of one of two batches of each rank in the examples of all ranks; ``known`` is that of this rank."""
        if not self.averages:
            return known
        counted = self.batch_size is not None or all(isinstance(x, Batches) and x.total for x in (one, other))
        sizes = (self.size_of(one), self.size_of(other)) if counted else (known, 1.0 - known)
        means = self.mean_of({"one": sizes[0], "other": sizes[1]})
        return means["one"] / (means["one"] + means["other"])

    def largest(self, number: float) -> float:
        """The largest of the numbers of all ranks, which differ only if ranks have hyperparameters of their own."""
        return max(self.gather(number), key=lambda x: (not math.isfinite(x), x)) if self.own else number

    def together(self, compute: Callable[[], T]) -> T:
        """What ``compute`` returns on this rank; all ranks raise if it fails on one of them."""
        kept: list[T] = []

        def run() -> list[Tensor | None]:
            kept.append(compute())
            return []

        self.mean(run, [])
        return kept[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order; they are sent as pickled data, so they should be small."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        with _Answering(self):
            torch.distributed.all_gather_object(found, value, group=self.handle)
        self.calls += 1
        return found

    def require_same(self, value: object, what: str) -> None:
        """Raise on all ranks unless they have equal values."""
        found = self.gather(value)
        if any(x != found[0] for x in found):
            other = next(r for r, x in enumerate(found) if x != found[0])
            raise EvaluationError(
                f"all ranks must have the same {what}; got {found[0]!r:.200} on rank 0 and {found[other]!r:.200} on "
                f"rank {other}. Make model, hyper and losses in the same way on each rank."
            )

    def reached(self, tensors: Mapping[str, Tensor], ids: set[int]) -> set[int]:
        """The identities of the tensors that losses of any rank depend on, with those known here."""
        if not self.averages:
            return ids
        flags = [torch.ones(()) if id(x) in ids else None for x in tensors.values()]
        like = [torch.zeros((), device=x.device) for x in tensors.values()]
        found = self.mean(lambda: flags, like)
        return ids | {id(x) for x, flag in zip(tensors.values(), found, strict=True) if flag is not None}

    def check_equal(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise unless weights and hyperparameters are the same on all ranks, by their sums and norms."""
        if not self.averages:
            return
        tensors = {n: x for n, x in tensors.items() if id(x) not in self.own}
        layout = {n: (list(x.shape), str(x.dtype)) for n, x in tensors.items()}
        if layout != self._layout:
            self.require_same(layout, "weights and hyperparameters, by name, shape and dtype")
            self._layout = layout
        with torch.no_grad():
            first = next(iter(tensors.values())).device
            sums = [x.sum(dtype=torch.float64).to(first) for x in tensors.values()]
            norms = [torch.linalg.vector_norm(x, dtype=torch.float64).to(first) for x in tensors.values()]
            numbers = torch.stack([*sums, *norms])
            ends = torch.cat([numbers, -numbers])
            self.reduce(ends, torch.distributed.ReduceOp.MAX)
            apart = (ends[: len(numbers)] + ends[len(numbers) :]) > _EQUAL * torch.stack([*norms, *norms])
        if bool(apart.any()):
            names = [n for i, n in enumerate(tensors) if bool(apart[i] or apart[i + len(tensors)])]
            raise EvaluationError(
                f"weights and hyperparameters must be the same on all ranks; {named(names)} differ. Draw their first "
                "values from the same seed on each rank, or send them from rank 0 (DistributedDataParallel sends those "
                "of its module alone); and step them along gradients that are means over the ranks."
            )

    def _flat(
        self, numbers: Sequence[float], own: Sequence[Tensor | None], like: Sequence[Tensor], size: float
    ) -> Tensor:
        """Numbers, and tensors times ``size``, as one vector in float32 or float64."""
        wide = not like or any(x.dtype == torch.float64 for x in like)
        dtype, device = torch.float64 if wide else torch.float32, like[0].device if like else self._device
        flat = torch.zeros(len(numbers) + sum(x.numel() for x in like), dtype=dtype, device=device)
        flat[: len(numbers)] = torch.tensor(numbers, dtype=dtype)
        begin = len(numbers)
        for x, shape in zip(own, like, strict=True):
            if x is not None:
                place = flat[begin : begin + shape.numel()]
                place.copy_(_tree.dense(x.detach()).reshape(-1)).mul_(size)
            begin += shape.numel()
        return flat

    def reduce(self, flat: Tensor, op: Any = None) -> None:
        """Reduce a buffer over the ranks, in place."""
        with _Answering(self):
            torch.distributed.all_reduce(flat, op or torch.distributed.ReduceOp.SUM, group=self.handle)
        self.calls += 1
        self.bytes += flat.numel() * flat.element_size()

    def _error(self, own: Exception | None) -> Exception:
        """The error to raise on this rank: of one class on all ranks, that of the first rank that failed."""
        said = None if own is None else (type(own).__name__, str(own), isinstance(own, Error))
        rank, first = next((r, x) for r, x in enumerate(self.gather(said)) if x is not None)
        kind, message, ours = first
        if own is not None and type(own).__name__ == kind:
            return own
        error: type[Exception] = getattr(errors, kind) if ours else EvaluationError
        other = error(f"{message if ours else f'a loss failed, with {kind}: {message}'} (on rank {rank})")
        other.__cause__ = own
        return other


ALONE = Group()


def is_replica(module: nn.Module) -> bool:
    """Whether it is DistributedDataParallel."""
    return isinstance(module, nn.parallel.DistributedDataParallel)


class _Answering:
    """Turns the errors of a communication with a process that has ended into one sentence."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else kind.__name__
            raise EvaluationError(
                f"every process of the group must answer; rank {self._group.rank} of {self._group.size} got no answer "
                f"from another one, which has ended or takes another path ({reason}). Look at the first error of the "
                "other processes, and start the run again; Tuner.load continues from its last checkpoint."
            ) from error
