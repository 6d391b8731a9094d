"""Conjugate gradient, with the safeguards that published hypergradient libraries leave out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .. import _tree
from .._tree import Tree
from ..errors import ArgumentError, require, require_integer, require_number
from .adaptation import FIRST_DAMPING, after_failure, after_success, limit_of
from .base import Solver, Wants
from .conjugate_run import Run
from .iterative import Iterative
from .preconditioning import (
    check_preconditioner,
    diagonal_inverse,
    given_preconditioner,
    kept_pairs,
    pair,
    quasi_newton,
    source_of,
)
from .system import Counted, Product, Report, Solution, Status, System, no_unique_answer

_CHECK_EVERY = 10
# The residual of a good iterate exceeds that of zero on an ill-conditioned system, but hardly by this much.
_RUNAWAY = 100.0
_UNDERDAMPED = (Status.NEGATIVE_CURVATURE, Status.DIVERGED)
_RAISES = 5
# The first solve of a warm-started run makes up to so many steps, while the residual falls and is above this value.
_FIRST_STEPS, _FIRST_RESIDUAL = 20, 0.1


@dataclass(frozen=True, eq=False)
class ConjugateGradient(Iterative):
    """Solve (A + δI) x = b by conjugate gradient, for a positive definite A + δI.

    It stops when ‖b − (A + δI) x‖ ≤ tolerance · ‖b‖, at ``max_steps``, or at the first direction p
    with pᵀ(A + δI)p ≤ 0, where the method is not defined: then it returns the iterate with the smallest residual
    and the status *negative curvature*. After ``max_steps`` it returns the last iterate. If the residual of that
    is above a hundred times that of zero, the status is *diverged*, and it returns the best iterate.

    Every ten steps, and wherever the recurrence has met the tolerance or may be rounding, the residual is computed
    from x, which costs a product. If rounding has moved the recurrence away from it, the directions start again, as
    long as the computed residual halves from one check to the next. After that the iterate with the smallest residual
    is returned, since more steps would only add rounding.

    Args:
        max_steps: the largest number of steps, one product each; ≥ 1.
        tolerance: the relative residual to stop at; ≥ 0. Or a function of the number of solves before this one,
            as in ``lambda k: 0.1 * 0.9**k``: the first hypergradients of a run need not be exact.
        damping: δ ≥ 0. None chooses it, and the report has the value: 1e-4 of the curvature along the first
            right-hand side, raised tenfold (and above the negative curvature that was met) each time a solve meets
            negative curvature or diverges, after which the solve begins again; halved after each solve that does
            neither, but not below (1e-4 + 0.015 ρ) of the largest curvature. ρ ≤ 1 measures how little the last
            solution says about the next system: it is a running mean of the share of a warm start's squared residual
            that its own system had not left. From a warm start, a solve that meets negative curvature after a step
            keeps that step's iterate instead. The next solves then make no more steps than it made, and from then on
            one fewer after a start that was dropped; after every twenty undisturbed ones they may make one step more.
        recycle: the number r of pairs (p, A p) of earlier solves to keep, 2 r vectors, as a
            limited-memory quasi-Newton preconditioner; 0 keeps none. It helps if successive systems
            change little, as with full batches.
        diagonal: whether to precondition with the diagonal that the problem knows, if any (a weight decay knows
            its own). With ``recycle`` it is the initial matrix.
        preconditioner: M⁻¹ as a function r ↦ M⁻¹ r of dicts of tensors, symmetric and positive definite; or a
            curvature with an inverse, such as `KFAC`, which `bestresponse.Implicit` takes at the weights and the
            batch of each call. A first solve that has not chosen its damping yet does not use that inverse. With
            ``recycle`` it is the initial matrix.

    Reference: Hestenes and Stiefel (1952); for hypergradients, and tolerances that shrink, Pedregosa (2016); for
    ``recycle``, Morales and Nocedal (2000).
    """

    damping: float | None = 0.0
    recycle: int = 0
    diagonal: bool = False
    preconditioner: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.damping is not None:
            require_number("ConjugateGradient.damping", self.damping)
            required = "≥ 0 and finite, or None"
            require(0 <= self.damping < math.inf, "ConjugateGradient.damping", required, self.damping)
        require_integer("ConjugateGradient.recycle", self.recycle, 0)
        if not isinstance(self.diagonal, bool):
            raise ArgumentError(f"ConjugateGradient.diagonal must be True or False; got {self.diagonal!r}.")
        check_preconditioner("ConjugateGradient", self.preconditioner)
        if self.preconditioner is not None and self.diagonal:
            raise ArgumentError(
                "ConjugateGradient takes a preconditioner or a diagonal; got both. Leave one of them out."
            )

    @property
    def wants(self) -> Wants:
        return Wants(diagonal=self.diagonal, preconditioner=source_of(self.preconditioner))

    @property
    def chooses_damping(self) -> bool:
        return self.damping is None

    def opening(self) -> Solver:
        if self.max_steps >= _FIRST_STEPS or type(self) is not ConjugateGradient:
            return self
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return _Opening(**{**own, "max_steps": _FIRST_STEPS}, least=self.max_steps)

    def shift(self, memory: Mapping[str, Any]) -> float:
        return float(memory.get("damping", 0.0)) if self.damping is None else self.damping

    def attempt(
        self,
        A: Counted,
        b: Tree,
        size: float,
        start: Tree | None,
        memory: dict[str, Any],
        **known: Any,
    ) -> Solution:
        if self.damping is not None:
            return super().attempt(A, b, size, start, memory, **known)
        # A start is a solution for the damping stored with it; without that damping it is useless.
        start = start if "damping" in memory else None
        solution = super().attempt(A, b, size, start, memory, **known)
        for _ in range(_RAISES):
            if solution.report.status not in _UNDERDAMPED:
                break
            # A start from an indefinite system is useless for the system with more damping.
            solution = super().attempt(A, b, size, None, solution.memory, **known)
            raised = "the damping was raised: there was negative curvature, or hardly any"
            detail = "; ".join(filter(None, (raised, solution.report.detail)))
            solution = replace(solution, report=replace(solution.report, detail=detail))
        return solution

    def iterate(self, system: System) -> Solution:
        damping = None if self._chooses_now(system) else self.shift(system.memory)
        goal = system.target * self.relative_residual
        # Along a run, an iterate before negative curvature is kept, and the number of steps adapts.
        adapts = self.damping is None and system.offset > 0.0
        run = Run(system, limit_of(system, self.max_steps) if adapts else self.max_steps, adapts)
        precondition = self._preconditioner(system, damping)
        p: Tree | None = None
        rz = 1.0
        while self._goes_on(run, goal, system.target):
            p, rz = self._direction(run, precondition(run.r), p, rz)
            product = system.A(p)
            along, square = _tree.dot(p, product), _tree.dot(p, p)
            if damping is None:
                size = _tree.norm(product) / math.sqrt(square)
                damping = FIRST_DAMPING * size if math.isfinite(size) else 0.0
            curvature = along + damping * square
            if run.lanczos:
                run.pivots.append(curvature / rz)
            if not run.accepts(along, square, damping, rz if self._preconditioned else None):
                break
            step = rz / curvature
            if self.recycle:
                run.pairs.append(pair(p, product, damping, curvature))
            run.advance(p, step, square)
            _tree.add_(_tree.add_(run.r, product, -step), p, -step * damping)
            del product
            if not run.measure(p, step):
                break
            if self._must_compute(run, goal, damping):
                if not run.check(*system.compute(run.x, damping, run.drift(damping), goal)):
                    break
                p = None if run.restarts else p
        return self._finish(run, system, damping or 0.0, goal)

    def _must_compute(self, run: Run, goal: float, damping: float) -> bool:
        """Whether to compute the residual: at regular intervals, and wherever the recurrence may be rounding."""
        last = run.step == run.most
        now_and_then = run.at_rounding if last else run.step % _CHECK_EVERY == 0
        return now_and_then or run.residual <= max(goal, 10.0 * run.drift(damping))

    def _direction(self, run: Run, z: Tree, p: Tree | None, previous: float) -> tuple[Tree, float]:
        """The next direction, conjugate to the last one ``p`` and written over it; and rᵀz."""
        rz = run.residual**2 if z is run.r else _tree.dot(run.r, z)
        if p is None:
            return _tree.copy(z), rz
        if run.lanczos:
            run.ratios.append(rz / previous)
        return _tree.add_(_tree.scale_(p, rz / previous), z), rz

    def _goes_on(self, run: Run, goal: float, target: float) -> bool:
        return run.residual > goal and run.step < run.most

    def _preconditioner(self, system: System, damping: float | None) -> Product:
        """The preconditioner for the whole solve; None for a solve that has not chosen its damping yet."""
        diagonal = system.diagonal if self.diagonal else None
        initial = None if diagonal is None or damping is None else diagonal_inverse(diagonal, damping)
        if self.preconditioner is not None:
            initial = given_preconditioner(self.preconditioner, system, damping)
        pairs = kept_pairs(system) if self.recycle else []
        if pairs and damping is not None:
            return quasi_newton(pairs, initial)
        return initial or (lambda r: r)

    @property
    def _preconditioned(self) -> bool:
        return bool(self.diagonal or self.recycle or self.preconditioner)

    def _chooses_now(self, system: System) -> bool:
        return self.damping is None and "damping" not in system.memory

    def _finish(self, run: Run, system: System, damping: float, goal: float) -> Solution:
        status = run.status
        if status is Status.STEPS_USED and run.known is not None and run.known <= goal:
            status = Status.CONVERGED
        elif status is Status.STEPS_USED and run.residual > _RUNAWAY * system.target:
            status = Status.DIVERGED
        met = (run.lowest, run.highest) if run.lowest <= run.highest else None
        ritz = None if self._preconditioned else run.ritz_values(damping)  # else they are those of M⁻¹A
        detail = "ended before negative curvature" if run.cut else ""
        if status is Status.DIVERGED:
            detail = f"the last residual was {run.residual / system.target:.2g} times that of zero"
        elif run.exhausted or (status is Status.STEPS_USED and run.residual <= goal):
            detail = f"the residual is as small as {_tree.vector_dtype(run.x)} products make it"
        spectrum = ritz or met
        if spectrum is not None and (unanswered := no_unique_answer(spectrum, system.eps, damping)):
            detail = "; ".join(filter(None, (detail, unanswered)))
        x, residual = run.answer(status.failed)
        if status.failed and run.drift(damping) > 0.1 * residual:  # the recurrence may be rounding
            residual, _ = system.compute(x, damping, 0.0, goal)
        if status.failed and not residual <= 1.0:
            x, residual = _tree.zeros_like(x), 1.0
        report = Report(
            status,
            run.step,
            run.step,
            residual,
            damping=damping or None,
            curvature=spectrum,
            detail=detail,
        )
        left = run.r if x is run.x and not status.failed else None
        stretch = None if self._preconditioned else run.stretch(damping)
        known = run.combination if x is run.x else None
        return Solution(x, report, self._memory(run, system, damping, report), left, stretch, known)

    def _memory(self, run: Run, system: System, damping: float, report: Report) -> dict[str, Any]:
        """The memory for the next solve: pairs, and the next damping."""
        memory = dict(system.memory)
        if self.recycle and not report.status.failed:
            memory["pairs"] = [*kept_pairs(system), *run.pairs][-self.recycle :]
        if self.damping is None and run.lowest <= run.highest:
            if report.status in _UNDERDAMPED:
                memory |= after_failure(damping, run.lowest)
            else:
                assert report.residual is not None
                left = report.residual / system.target
                memory |= after_success(system, damping, run.highest, left, run.step, run.cut, self.max_steps)
        return memory


@dataclass(frozen=True, eq=False)
class _Opening(ConjugateGradient):
    """Its own steps, and more while the residual is between a tenth of zero's and zero's, and falls."""

    least: int = 0

    def _goes_on(self, run: Run, goal: float, target: float) -> bool:
        promising = _FIRST_RESIDUAL * target < run.residual <= min(run.smallest, target)
        return (run.step < self.least or promising) and super()._goes_on(run, goal, target)
