"""Differentiation through optimisation in forward mode: ∂w/∂λ, propagated along the steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..errors import EvaluationError, require_integer
from ..passes.running_statistics import Reading
from ..problem import Passes
from ..solvers.capacity import require_memory
from ..verification.base import Claim
from .base import combine
from .hypergradient import Hypergradient
from .reach import refuse_unreached
from .rules import SGD, Rule
from .savings import bytes_of, savings
from .steps_ahead import ThroughSteps, at_the_end, claim_of
from .trajectory import Point, Tangent, Trajectory


@dataclass(frozen=True, eq=False)
class Forward(ThroughSteps):
    """The hypergradient of `Unrolled` in forward mode, which propagates ∂w/∂λ along the steps.

        Z_{k+1} = (∂w_{k+1}/∂w_k) Z_k + ∂w_{k+1}/∂λ,  Z_0 = 0;   dL_V/dλ = ∂L_V/∂λ + ∂L_V/∂w(w_K) Z_K

    Memory does not grow with the steps. Memory and time grow with the hyperparameters: use it for few hyperparameters
    and many steps. The result equals that of ``Unrolled`` to rounding. It needs third derivatives, which torch's batch
    norm no longer has from version 2.14 on.

    Args:
        steps: K ≥ 1.
        step_size: α > 0, or a function of ``hyper``, as for `Unrolled`.
        rule: the optimiser's steps, as for `Unrolled`.
        chunk: the number of hyperparameters to propagate at a time, each with a copy of weights and moments; None means
            all. The steps are repeated for each chunk.
        fresh_batches: whether each step takes the next of several `Batches`, or all of them together.

    Raises:
        ArgumentError: an argument out of its range.
        EvaluationError: as for `Unrolled`.

    Reference: Franceschi, Donini, Frasconi and Pontil (2017).
    """

    rule: Rule = SGD()
    chunk: int | None = None
    fresh_batches: bool = False

    def __post_init__(self) -> None:
        self._check(self.rule, self.fresh_batches)
        if self.chunk is not None:
            require_integer("Forward.chunk", self.chunk, 1)

    @property
    def savings(self) -> str:
        return "a smaller chunk; for many hyperparameters Unrolled or Implicit()"

    def differentiate(self, passes: Passes, train_batch: Any, val_batch: Any) -> Hypergradient:
        problem = passes.problem
        if problem.group.own:
            raise EvaluationError(
                "Forward needs the same hyperparameters on all ranks; got a table of each rank's own, "
                "Weights(sharded=True). Use Unrolled."
            )
        path = Trajectory(self.rule, self.step_size, self.steps, passes, train_batch, self.fresh_batches)
        number = _tree.size(problem.hyperparameters)
        size = min(self.chunk or number, number)
        # Each changes its copy of weights and moments at each step, and the new ones come beside the old ones.
        copies = size * (1 + len(self.rule.moments)) * min(2, self.steps)
        what = f"Forward with {size:,} hyperparameters at a time"
        require_memory(what, bytes_of(problem.weights, copies), savings(self.savings, train_batch))
        entries: list[float | None] = []
        val_loss, val_gradient, direct = 0.0, Tree(), dict[str, Tensor | None]()
        read = Reading(passes, train_batch)
        for begin in range(0, max(number, 1), max(size, 1)):
            end, tangents = _carried(path, range(begin, min(begin + size, number)), self.steps)
            if not val_gradient:
                val_loss, val_gradient, direct = at_the_end(passes, val_batch, end, read)
            entries += [_along(val_gradient, t) for t in tangents]
        path.finish()
        refuse_unreached(problem, direct, path.reached)
        result = combine(problem, val_loss, direct, _by_name(entries, problem.hyperparameters))
        return replace(result, norms=read.norms)

    def claim(self) -> Claim:
        return claim_of(self, self.rule, replace(self, fresh_batches=False))


def _carried(path: Trajectory, entries: range, steps: int) -> tuple[Point, list[Tangent]]:
    """The last point, and the derivative of that point with respect to each of these entries of λ."""
    units = [_unit(path.hyperparameters, entry) for entry in entries]
    changes = [[*path.settings.push(path.hyperparameters, unit), *unit] for unit in units]
    point = path.start()
    tangents: list[Tangent] = [[None] * len(point.flat()) for _ in entries]
    for number in range(steps):
        piece = path.graph(point, number, number + 1)
        push = piece.push()
        tangents = [push([*t, *change]) for t, change in zip(tangents, changes, strict=True)]
        point = piece.end.detached()
    return point, tangents


def _unit(tensors: Sequence[Tensor], entry: int) -> Tangent:
    """A unit change of one entry; None for the tensors that do not contain the entry."""
    unit: Tangent = [None] * len(tensors)
    for index, x in enumerate(tensors):
        if entry < x.numel():
            change = torch.zeros_like(x).reshape(-1)
            change[entry] = 1.0
            unit[index] = change.view(x.shape)
            break
        entry -= x.numel()
    return unit


def _along(val_gradient: Tree, tangent: Tangent) -> float | None:
    """∂L_V/∂w · ẇ, where a point lists each weight before its moments; None if no weight moves."""
    kept = len(tangent) // len(val_gradient)
    moved = {n: x for n, x in zip(val_gradient, tangent[::kept], strict=True) if x is not None}
    return _tree.dot(moved, val_gradient) if moved else None


def _by_name(
    entries: Sequence[float | None], hyperparameters: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    """The entries of all hyperparameters, in order, as tensors; None for hyperparameters that move no weight."""
    found: dict[str, Tensor | None] = {}
    begin = 0
    for name, p in hyperparameters.items():
        own = entries[begin : begin + p.numel()]
        begin += p.numel()
        values = torch.tensor([x or 0.0 for x in own], dtype=torch.float64)
        idle = bool(own) and all(x is None for x in own)
        found[name] = None if idle else values.to(p.device, p.dtype).view(p.shape)
    return found
