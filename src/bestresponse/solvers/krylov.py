"""Conjugate gradient, with what published hypergradient libraries leave out."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import _tree
from .._tree import Tree
from .base import Counted, Report, Solution, Solver, Status, System, require, require_integer, require_number

_CHECK_EVERY = 10
# The residual of a good iterate exceeds that of zero on an ill-conditioned system, but hardly by this much.
_RUNAWAY = 100.0
_FIRST_DAMPING = 1e-4
_RAISE = 10.0
_UNDERDAMPED = (Status.NEGATIVE_CURVATURE, Status.DIVERGED)
_RAISES = 5


@dataclass(frozen=True, eq=False)
class ConjugateGradient(Solver):
    """Solve (A + δI) x = b by conjugate gradient, for a positive definite A + δI.

    It stops when ‖b − (A + δI) x‖ ≤ tolerance · ‖b‖, at ``max_steps``, or at the first direction p
    with pᵀ(A + δI)p ≤ 0, where the method has no meaning: then it returns the best iterate by residual
    with the status *negative curvature*. At the step limit the last iterate is returned, unless its
    residual is above a hundred times that of zero, which is *diverged*, with the best iterate. Every ten
    steps the residual is computed anew, which costs a product and counts as one.

    Args:
        max_steps: the largest number of steps, one product each; ≥ 1.
        tolerance: the relative residual to stop at; ≥ 0.
        damping: δ ≥ 0. None chooses it: 1e-4 of the curvature along the first right-hand side, raised
            tenfold (and above the negative curvature that was met) each time a solve meets negative
            curvature or diverges, after which the solve begins again; halved after each solve that does
            neither, but not below that first value. The report tells it.
        diagonal: precondition with the diagonal that the problem knows (a weight decay knows its own),
            where it knows one.

    Reference: Hestenes and Stiefel (1952); for hypergradients, Pedregosa (2016).
    """

    max_steps: int = 20
    tolerance: float = 1e-6
    damping: float | None = 0.0
    diagonal: bool = False

    def __post_init__(self) -> None:
        require_integer("ConjugateGradient.max_steps", self.max_steps, 1)
        require_number("ConjugateGradient.tolerance", self.tolerance)
        require(self.tolerance >= 0, "ConjugateGradient.tolerance", "≥ 0", self.tolerance)
        if self.damping is not None:
            require_number("ConjugateGradient.damping", self.damping)
            required = "≥ 0 and finite, or None"
            require(0 <= self.damping < math.inf, "ConjugateGradient.damping", required, self.damping)

    def opening(self) -> Solver:
        return replace(self, max_steps=max(self.max_steps, 20), tolerance=max(self.tolerance, 0.1))

    def shift(self, memory: Mapping[str, Any]) -> float:
        return float(memory.get("damping", 0.0)) if self.damping is None else self.damping

    def attempt(
        self,
        A: Counted,
        b: Tree,
        size: float,
        start: Tree | None,
        memory: dict[str, Any],
        diagonal: Tree | None,
    ) -> Solution:
        if self.damping is not None:
            return super().attempt(A, b, size, start, memory, diagonal)
        # A start is a solution under the damping that came with it; without that it says nothing.
        start = start if "damping" in memory else None
        solution = super().attempt(A, b, size, start, memory, diagonal)
        for _ in range(_RAISES):
            if solution.report.status not in _UNDERDAMPED:
                break
            # A start that an indefinite system made is worth nothing to the one with more damping.
            solution = super().attempt(A, b, size, None, solution.memory, diagonal)
            detail = "the damping was raised: there was negative curvature, or hardly any"
            solution = replace(solution, report=replace(solution.report, detail=detail))
        return solution

    def iterate(self, system: System) -> Solution:
        damping = None if self._chooses_now(system) else self.shift(system.memory)
        run = _Run(system.b)
        precondition = _preconditioner(system.diagonal if self.diagonal else None, damping)
        z = precondition(run.r)
        p, rz = _tree.copy(z), _tree.dot(run.r, z)
        del z
        converged = self.tolerance * system.target
        while run.residual > converged and run.step < self.max_steps:
            product = system.A(p)
            along, square = _tree.dot(p, product), _tree.dot(p, p)
            if damping is None:
                damping = _FIRST_DAMPING * abs(along) / square if math.isfinite(along) else 0.0
            curvature = along + damping * square
            if not run.accepts(along, square, damping):
                break
            step = rz / curvature
            run.advance(p, step)
            if run.step % _CHECK_EVERY == 0 and run.step < self.max_steps:
                run.r = system.residual(run.x, damping)
            else:
                _tree.add_(_tree.add_(run.r, product, -step), p, -step * damping)
            if not run.measure(p, step):
                break
            del product
            z = precondition(run.r)
            rz, previous = _tree.dot(run.r, z), rz
            p = _tree.add_(_tree.scale_(p, rz / previous), z)
        return self._finish(run, system, damping or 0.0)

    def _chooses_now(self, system: System) -> bool:
        return self.damping is None and "damping" not in system.memory

    def _finish(self, run: "_Run", system: System, damping: float) -> Solution:
        target = system.target
        converged = self.tolerance * target
        status = run.status
        if status is Status.STEP_LIMIT and run.residual <= converged:
            status = Status.CONVERGED
        elif status is Status.STEP_LIMIT and run.residual > _RUNAWAY * target:
            status = Status.DIVERGED
        x, residual = (run.best, run.smallest) if status.failed else (run.x, run.residual)
        met = (run.lowest, run.highest) if run.lowest <= run.highest else None
        detail = ""
        if status is Status.DIVERGED:
            detail = f"the last residual was {run.residual / target:.2g} times that of zero"
        report = Report(
            status, run.step, run.step, residual, damping=damping or None, curvature=met, detail=detail
        )
        memory = dict(system.memory)
        if self.damping is None and met is not None:
            if status in _UNDERDAMPED:
                memory["damping"] = max(_RAISE * damping, -2.0 * run.lowest)
            else:
                memory["damping"] = max(damping / 2.0, _FIRST_DAMPING * run.highest)
        return Solution(x, report, memory)


class _Run:
    """The iterate, its residual (in the place of b), and the best of them; what was met on the way."""

    def __init__(self, b: Tree) -> None:
        self.x, self.r = _tree.zeros_like(b), b
        self.step = 0
        self.residual = self.smallest = 1.0
        self.lowest, self.highest = math.inf, -math.inf
        self.status = Status.STEP_LIMIT
        self._kept: Tree | None = None
        self._precision = 4.0 * min(torch.finfo(x.dtype).eps for x in b.values())

    @property
    def best(self) -> Tree:
        """The iterate with the smallest residual, which is the present one unless another was kept."""
        return self.x if self._kept is None else self._kept

    def accepts(self, along: float, square: float, damping: float) -> bool:
        """Whether the curvature along a direction is positive, beyond rounding."""
        if not math.isfinite(along) or not square > 0.0:
            self.status = Status.NOT_FINITE
            return False
        curvature = along / square
        earlier = self.lowest
        self.lowest, self.highest = min(earlier, curvature), max(self.highest, curvature)
        rounding = self._precision * (self.highest + damping)
        if earlier + damping <= rounding:
            # A step was made along a curvature that now shows to be rounding: nothing of it can be trusted.
            self._kept, self.smallest = _tree.zeros_like(self.x), 1.0
        elif curvature + damping > rounding:
            return True
        self.status = Status.NEGATIVE_CURVATURE
        return False

    def advance(self, p: Tree, step: float) -> None:
        self.step += 1
        _tree.add_(self.x, p, step)

    def measure(self, p: Tree, step: float) -> bool:
        """Measure the residual; keep the iterate before this one where it was the best."""
        self.residual = _tree.norm(self.r)
        if self.residual <= self.smallest:
            self.smallest, self._kept = self.residual, None
        elif self._kept is None:
            # The first iterate's predecessor is zero, exactly: a huge step would leave rounding in its place.
            self._kept = _tree.zeros_like(p) if self.step == 1 else _tree.add(self.x, p, -step)
        if not math.isfinite(self.residual):
            self.status = Status.NOT_FINITE
            return False
        return True


def _preconditioner(diagonal: Tree | None, damping: float | None) -> Callable[[Tree], Tree]:
    """Maps r to M⁻¹ r with M = diag(d) + δ; where there is no damping, the mean of d stands for it.

    A solve that has yet to choose its damping is not preconditioned.
    """
    if diagonal is None or damping is None:
        return lambda r: r
    shift = damping or sum(float(d.sum()) for d in diagonal.values()) / _tree.size(diagonal) or 1.0
    inverse = {name: 1.0 / (d.detach() + shift) for name, d in diagonal.items()}
    return lambda r: {name: x * inverse[name] for name, x in r.items()}
