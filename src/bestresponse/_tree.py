"""Arithmetic on trees, dicts of tensors with equal keys: the only sums over all weights.

Sums run in float32 at least, whatever the tensors' dtype, and in float64 across tensors. Norms, products, sums and
checks also take sparse tensors, the gradients of tables of hyperparameters.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Tensor]


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1).to(_wide(x))


def is_sharded(x: object) -> bool:
    """Whether it is a DTensor, of which each process holds a part."""
    # Code that makes a DTensor has imported its module.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def _own(a: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Any]:
    """The parts of tensors on this process, and the group of processes over which to sum; None for whole ones."""
    first: Any = next((x for x in a.values() if is_sharded(x)), None)
    if first is None:
        return a, None
    return {n: part_of(x) for n, x in a.items()}, first.device_mesh.get_group()


def part_of(x: Any) -> Tensor:
    """The part of a tensor that this process holds: all of it unless it is sharded."""
    part: Tensor = x.detach().to_local() if is_sharded(x) else x
    return part


def _sum(numbers: Tensor, group: Any) -> Tensor:
    """The sum over the processes of numbers of each."""
    if group is not None:
        torch.distributed.all_reduce(numbers, group=group)
    return numbers


def entries(x: Tensor) -> Tensor:
    """A tensor's own entries: for a sparse one the values of its rows, each row once."""
    return x if x.layout == torch.strided else x.coalesce().values()


def dense(x: Tensor) -> Tensor:
    """A tensor as a dense one."""
    return x if x.layout == torch.strided else x.to_dense()


def zeros(x: Tensor, like: Tensor | None) -> Tensor:
    """Zeros of the shape of ``x``; a sparse tensor without rows if ``like`` is sparse."""
    return torch.zeros_like(x if like is None or like.layout == torch.strided else like)


def summed(x: Tensor, y: Tensor) -> Tensor:
    """The sum of two tensors, each dense or sparse; a sparse sum has each row once."""
    x, y = (y, x) if x.is_sparse else (x, y)  # torch adds a sparse tensor to a dense one only
    total = x + y
    return total.coalesce() if total.is_sparse else total


def _together(scalars: list[Tensor]) -> Tensor:
    """Scalars of any devices and dtypes as one vector in float64."""
    first = scalars[0]
    if any(x.device != first.device or x.dtype != first.dtype for x in scalars):
        scalars = [x.to(first.device, torch.float64) for x in scalars]
    return torch.stack(scalars).double()


def dot(a: Tree, b: Tree) -> float:
    """The sum of the products of all entries."""
    (mine, group), (other, _) = _own(a), _own(b)
    parts = [_product(x, other[name]) for name, x in mine.items()]
    return float(_sum(_together(parts).sum(), group)) if parts else 0.0


def _product(x: Tensor, y: Tensor) -> Tensor:
    if x.layout == y.layout == torch.strided:
        return torch.dot(_flat(x), _flat(y))
    both = (x.coalesce() if x.is_sparse else x) * (y.coalesce() if y.is_sparse else y)
    return entries(both).sum(dtype=_wide(x))


def norm(a: Tree) -> float:
    """The Euclidean norm; entries whose squares underflow or overflow are scaled first."""
    if not a:
        return 0.0
    own, group = _own(a)
    a = {name: entries(x) for name, x in own.items()}
    size = _plain_norm(a)
    if group is not None:
        square = next(iter(a.values())).new_tensor(size, dtype=torch.float64).square()
        return math.sqrt(float(_sum(square, group)))
    if 1e-15 < size < math.inf or math.isnan(size):  # else squares may have been denormal
        return size
    largest = max(float(x.abs().max()) if x.numel() else 0.0 for x in a.values())
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * _plain_norm({name: x.double() / largest for name, x in a.items()})


def _plain_norm(a: Tree) -> float:
    norms = [torch.linalg.vector_norm(x, dtype=_wide(x)) for x in a.values()]
    return float(torch.linalg.vector_norm(_together(norms)))


def root_mean_squares(a: Mapping[str, Tensor]) -> dict[str, float]:
    """The value for the entries of each tensor."""
    own, group = _own(a)
    norms = [torch.linalg.vector_norm(x, dtype=_wide(x)) for x in own.values()]
    sizes = _sum(_together(norms).square(), group).sqrt().tolist() if norms else []
    return {n: size / math.sqrt(max(1, x.numel())) for (n, x), size in zip(a.items(), sizes, strict=True)}


def scale(a: Tree, factor: float) -> Tree:
    """A new tree, ``factor * a``."""
    return dict(zip(a, torch._foreach_mul(list(a.values()), factor), strict=True))


def scale_(a: Tree, factor: float) -> Tree:
    """``a *= factor``, in place."""
    torch._foreach_mul_(list(a.values()), factor)
    return a


def add(a: Tree, b: Tree, factor: float = 1.0) -> Tree:
    """A new tree, ``a + factor * b``."""
    sums = torch._foreach_add(list(a.values()), [b[name] for name in a], alpha=factor)
    return dict(zip(a, sums, strict=True))


def add_(a: Tree, b: Tree, factor: float = 1.0) -> Tree:
    """``a += factor * b``, in place."""
    torch._foreach_add_(list(a.values()), [b[name] for name in a], alpha=factor)
    return a


def copy(a: Mapping[str, Tensor]) -> Tree:
    """A new tree with the values of ``a``, outside any graph."""
    return {name: x.detach().clone() for name, x in a.items()}


@torch.no_grad()
def write_(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """Copy the values of ``b`` into the tensors of ``a``, in place."""
    for name, x in a.items():
        x.copy_(b[name])


@contextmanager
def put_back(a: Mapping[str, Tensor]) -> Iterator[None]:
    """Restore the values of ``a`` at the end, so that graphs of the caller stay valid."""
    kept = copy(a)
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(a.values())):
        try:
            yield
        finally:
            write_(a, kept)


def zeros_like(a: Mapping[str, Tensor]) -> Tree:
    """A tree of zeros with the shapes of ``a``."""
    return {name: torch.zeros_like(x) for name, x in a.items()}


def detached(a: Mapping[str, Tensor]) -> Tree:
    """The same storage, outside any graph."""
    return {name: x.detach() for name, x in a.items()}


def not_finite(a: Mapping[str, Tensor | None]) -> list[str]:
    """The names of the tensors that hold a NaN or an infinity."""
    present = {name: x.detach() for name, x in a.items() if x is not None and x.numel()}
    if not present:
        return []
    own, group = _own(present)
    given = {name: entries(x) for name, x in own.items()}
    # A sum with one in it is one, and is much faster than the test of each entry; a large sum may overflow.
    sums = _together([x.sum(dtype=_wide(x)) for x in given.values()])
    if group is None and bool(sums.isfinite().all()):
        return []
    bad = _sum(torch.tensor([float(not bool(x.isfinite().all())) for x in given.values()]).to(sums), group)
    return [name for name, count in zip(given, bad.tolist(), strict=True) if count]


def size(a: Mapping[str, Tensor]) -> int:
    """The number of entries in all tensors together."""
    return sum(x.numel() for x in a.values())


def joined(trees: Mapping[str, Tree]) -> Tree:
    """Several trees as one, each under its name: ``fold0.weight``."""
    return {f"{prefix}.{name}": x for prefix, tree in trees.items() for name, x in tree.items()}


def divided(a: Tree) -> dict[str, Tree]:
    """The inverse of `joined`."""
    trees: dict[str, Tree] = {}
    for name, x in a.items():
        prefix, _, rest = name.partition(".")
        trees.setdefault(prefix, {})[rest] = x
    return trees


def same_layout(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether names, shapes, dtypes and devices agree."""
    return a.keys() == b.keys() and all(
        x.shape == b[name].shape and x.dtype == b[name].dtype and x.device == b[name].device
        for name, x in a.items()
    )


def flatten(a: Tree) -> Tensor:
    """All entries as one new vector, in the order of the names, on the device of the first; float32 at least."""
    device, dtype = next(iter(a.values())).device, vector_dtype(a)
    return torch.cat([x.detach().reshape(-1).to(device, dtype) for x in a.values()])


def vector_dtype(a: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of `flatten`."""
    return torch.float64 if any(x.dtype == torch.float64 for x in a.values()) else torch.float32


def number(a: Mapping[str, Tensor]) -> Tensor:
    """Zero, in the dtype and on the device of `flatten`."""
    return torch.zeros((), dtype=vector_dtype(a), device=next(iter(a.values())).device)


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Tree:
    """The inverse of `flatten`: a vector cut into the shapes of ``like``, with its dtypes and devices."""
    pieces: Iterable[Tensor] = torch.split(vector, [x.numel() for x in like.values()])
    return {
        name: piece.view(x.shape).to(x.device, x.dtype)
        for (name, x), piece in zip(like.items(), pieces, strict=True)
    }
