"""Differences of a problem's values along directions of its tensors, and their comparison with derivatives."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor, nn

from .. import _tree
from .._tree import Tree

Values = Callable[[], Tree]


@dataclass(frozen=True)
class Step:
    """The length of a difference, and the thresholds for comparing derivatives with it.

    Attributes:
        size: the length as a share of the tensors' entries.
        right: the largest relative distance of a right derivative.
        wrong: the smallest relative distance of a wrong derivative.
    """

    size: float
    right: float
    wrong: float


# In float64, where kinks are rarely crossed; the last is for losses that compute a part in float32.
FINE = (Step(1e-7, 1e-4, 2e-3), Step(1e-5, 1e-4, 2e-3), Step(1e-2, 2e-2, 0.1))
# For values instead of gradients; their rounding is larger relative to a derivative.
FINE_VALUES = (Step(1e-5, 1e-4, 2e-3), Step(1e-3, 1e-2, 5e-2))
# For values where second derivatives are a small part; these are checked separately.
FINEST_VALUES = (Step(1e-5, 1e-6, 1e-5), *FINE_VALUES)
COARSE = (Step(1e-2, 2e-2, 0.1), Step(2e-3, 2e-2, 0.1))

# A mismatch must exceed so many times the rounding of a difference, and so many times its error, to count.
_ROUNDING, _CLEAR = 30.0, 10.0
# The number of random numbers to draw; they repeat after that. It is prime, so no two rows of a matrix are equal.
_DRAWN = 65_521


@dataclass(frozen=True)
class Verdict:
    """The result of comparing derivatives with differences, by name.

    Attributes:
        kind: "right"; "wrong" if steps of three sizes agree on another value; "unclear" if they do not agree.
        names: the names with wrong derivatives.
    """

    kind: Literal["right", "wrong", "unclear"]
    names: Sequence[str] = ()

    def and_also(self, other: "Verdict") -> "Verdict":
        """The verdict on both: wrong if one is wrong, else unclear if one is."""
        worse = max(self, other, key=lambda v: ("right", "unclear", "wrong").index(v.kind))
        return Verdict(worse.kind, [*self.names, *other.names])


class Line:
    """Tensors on a line through their values, x + t v: moved in place, and restored from a copy at the end."""

    def __init__(self, tensors: Mapping[str, Tensor], v: Tree) -> None:
        self._tensors, self._v = {n: tensors[n] for n in v}, v
        self._t = 0.0

    @property
    def t(self) -> float:
        """The present point."""
        return self._t

    def __enter__(self) -> Self:
        self._kept = _tree.copy(self._tensors)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._write()
        except BaseException:  # an interrupt
            self._write()
            raise

    def _write(self) -> None:
        with self._unseen():
            _tree.write_(self._tensors, self._kept)

    def _unseen(self) -> AbstractContextManager[None]:
        """Hide the moves from tensor versions: graphs of the caller stay valid, since the values are restored."""
        return torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(self._tensors.values()))

    @torch.no_grad()
    def to(self, t: float) -> None:
        """Go to x + t v."""
        self._t = t
        with self._unseen():
            for name, x in self._tensors.items():
                torch.add(self._kept[name], self._v[name], alpha=t, out=x)

    @contextmanager
    def aside(self, step: float) -> Iterator[None]:
        """A step from the present point, and back."""
        here = self._t
        self.to(here + step)
        try:
            yield
        finally:
            self.to(here)


def direction(tensors: Mapping[str, Tensor], module: nn.Module, seed: int) -> Tree:
    """A random direction; each tensor moves in proportion to its entries, and tensors of zeros move like the mean."""
    generator = torch.Generator().manual_seed(seed)
    sizes = scales(tensors)
    rows = still(module, tensors)
    found = {}
    for name, x in tensors.items():
        drawn = torch.rand(min(x.numel(), _DRAWN), generator=generator, dtype=torch.float32, device="cpu")
        drawn = drawn.sub_(0.5).mul_(12.0**0.5 * sizes[name]).to(x.device, x.dtype)
        if x.numel() > _DRAWN:
            drawn = drawn.repeat(math.ceil(x.numel() / _DRAWN))[: x.numel()]
        found[name] = masked(drawn.view(x.shape), rows.get(name))
    return found


def scales(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """The root mean square of the entries of each tensor; that of all tensors for a tensor of zeros."""
    counts = {n: max(1, x.numel()) for n, x in tensors.items()}
    norms = {n: float(x.detach().norm()) if x.numel() else 0.0 for n, x in tensors.items()}
    whole: float = (sum(s**2 for s in norms.values()) / max(1, sum(counts.values()))) ** 0.5
    return {n: norms[n] / counts[n] ** 0.5 or whole or 1.0 for n in tensors}


def still(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The rows of padding indices, whose gradient torch leaves out."""
    padded = {
        id(m.weight): m.padding_idx
        for m in module.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.padding_idx is not None
    }
    return {n: padded[id(x)] for n, x in tensors.items() if id(x) in padded}


def masked(x: Tensor, row: int | None) -> Tensor:
    """A tensor whose ``row`` is set to zero."""
    if row is not None:
        x[row] = 0.0
    return x


def gradient(loss: Tensor, tensors: Mapping[str, Tensor]) -> Tree:
    """The gradient of a loss, dense, with zeros for tensors that the loss does not reach."""
    found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    return {n: or_zero(g, x) for (n, x), g in zip(tensors.items(), found, strict=True)}


def or_zero(x: Tensor | None, like: Tensor) -> Tensor:
    """A derivative outside any graph, dense, with zeros if it is missing."""
    if x is None:
        return torch.zeros_like(like)
    return _tree.dense(x.detach())


class Differences:
    """Differences of ``values`` along a line; one-sided if the value here is known and the step is short.

    ``sizes`` are factors for comparing the tensors; the default factor is one.
    """

    def __init__(
        self,
        values: Values,
        line: Line,
        here: Tree | None = None,
        sizes: Mapping[str, float] | None = None,
    ) -> None:
        self._values, self._line, self._here = values, line, here
        self._sizes = sizes or {}
        self._rounded: dict[str, float] = {}

    def at(self, step: float) -> Tree:
        """The difference of one step to both sides."""
        with self._line.aside(step):
            ahead = self._values()
        with self._line.aside(-step):
            return self._over(ahead, self._values(), 2.0 * step)

    def _first(self, step: float) -> Tree:
        if self._here is None or step > 1e-6:
            return self.at(step)
        with self._line.aside(step):
            return self._over(self._values(), self._here, step)

    def _over(self, ahead: Tree, behind: Tree, length: float) -> Tree:
        self._rounded = {n: torch.finfo(x.dtype).eps * self._norm(n, x) for n, x in ahead.items()}
        return {n: torch.sub(x, behind[n]).div_(length) for n, x in ahead.items()}

    def _norm(self, name: str, x: Tensor) -> float:
        return float(x.norm()) * self._sizes.get(name, 1.0)

    def judge(self, claimed: Tree, groups: Sequence[Sequence[str]], steps: Sequence[Step]) -> Verdict:
        """Compare derivatives with differences, and conclude only if steps of three sizes agree.

        In each group of names, only those count that are not a small part of the whole.
        """
        for step in steps:
            fine = self._first(step.size)
            size = self._size(claimed, fine, groups)
            rounding = {
                n: _ROUNDING / step.size * max(self._rounded[m] for m in group)
                for group in groups
                for n in group
            }
            off = {n: self._norm(n, x - fine[n]) for n, x in claimed.items()}
            far = [
                n for n, x in off.items() if not x <= step.right * size[n] + rounding[n]
            ]  # NaN counts as far
            if not far:
                return Verdict("right")
            others = [self.at(step.size * share) for share in (0.5, 0.125)]
            error = {n: max(self._norm(n, x - other[n]) for other in others) for n, x in fine.items()}
            wrong = [
                n for n in far if off[n] > step.wrong * size[n] + _CLEAR * (error[n] + 8.0 * rounding[n])
            ]
            if wrong:
                return Verdict("wrong", wrong)
        return Verdict("unclear")

    def _size(self, claimed: Tree, fine: Tree, groups: Sequence[Sequence[str]]) -> dict[str, float]:
        size: dict[str, float] = {}
        for group in groups:
            norms = {n: (self._norm(n, claimed[n]), self._norm(n, fine[n])) for n in group}
            whole = max(math.hypot(*(pair[i] for pair in norms.values())) for i in (0, 1)) if group else 0.0
            size |= {n: norms[n][1] + 0.1 * whole for n in group}
        return size
