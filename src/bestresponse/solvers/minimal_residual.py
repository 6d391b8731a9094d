"""Minimal residuals over the Krylov space: for curvatures that are indefinite, singular or not quite symmetric."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import _tree
from .._tree import Tree
from ..errors import require, require_number
from .base import Wants
from .iterative import Iterative
from .preconditioning import check_preconditioner, given_preconditioner, source_of
from .system import Product, Report, Solution, Status, System, add_damping, no_unique_answer

# The largest relative residual of a solution, as for the dense inverse.
_LEFT = 1e-2
_CHECK_EVERY = 10


@dataclass(frozen=True)
class Cycle:
    """One run of the iteration from zero, on a right-hand side of norm one.

    Attributes:
        x: the last iterate.
        residual: the norm of the residual by the recurrence; NaN where a product was not finite.
        norm: the norm of A + δI, as far as the iteration has seen it; zero with a preconditioner.
        steps: the number of steps.
        exhausted: whether no further step can reduce the residual: x is a least-squares solution.
        ritz: the eigenvalues of A on the Krylov space, in rising order; none with a preconditioner.
    """

    x: Tree
    residual: float
    norm: float
    steps: int
    exhausted: bool
    ritz: list[float]


@dataclass(frozen=True, eq=False)
class MinimalResidual(Iterative):
    """The common part of MINRES and GMRES: arguments, restarts from computed residuals, and the report.

    A subclass writes `cycle`. A computed residual judges the result of each cycle. If rounding makes it
    larger than the residual of the recurrence, the next cycle starts from it. So the residual falls from cycle to
    cycle, and no reported residual is the product of rounding.
    """

    damping: float = 0.0
    preconditioner: Any = None

    needs_definite = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        super().__post_init__()
        require_number(f"{name}.damping", self.damping)
        require(0 <= self.damping < math.inf, f"{name}.damping", "≥ 0 and finite", self.damping)
        check_preconditioner(name, self.preconditioner)

    @property
    def wants(self) -> Wants:
        return Wants(preconditioner=source_of(self.preconditioner))

    def shift(self, memory: object) -> float:
        return self.damping

    @abstractmethod
    def cycle(
        self, system: System, b: Tree, goal: float, limit: int, precondition: Product | None
    ) -> Iterator[Cycle]:
        """At most ``limit`` steps on (A + δI) x = b, where ‖b‖ = 1: their results at intervals and at the end."""

    def iterate(self, system: System) -> Solution:
        goal = system.target * self.relative_residual
        precondition = given_preconditioner(self.preconditioner, system, self.damping)
        x, left, size = _tree.zeros_like(system.b), system.b, 1.0
        steps, falls, exhausted, status = 0, True, False, Status.STEPS_USED
        ritz: list[float] = []
        while size > goal and steps < self.max_steps and falls and not exhausted and not status.failed:
            unit = 1.0 if steps == 0 else _tree.norm(left)
            if unit <= goal:  # the remaining residual is known to be rounding
                falls = False
                break
            b = left if steps == 0 else _tree.scale(left, 1.0 / unit)
            first, start, begun, opening = not ritz, x, steps, size
            for cycle in self.cycle(system, b, goal / unit, self.max_steps - steps, precondition):
                steps, ritz = begun + cycle.steps, cycle.ritz if first else ritz
                candidate = _tree.add(start, cycle.x, unit)
                floor = system.eps * cycle.norm * (system.offset + _tree.norm(candidate))
                true, computed = math.nan, left
                if math.isfinite(cycle.residual):
                    true, computed = system.compute(candidate, self.damping, floor, goal)
                if not math.isfinite(true):
                    status = Status.NOT_FINITE
                    break
                lost, falls = true > 1.5 * unit * cycle.residual, true <= 0.5 * opening
                exhausted = cycle.exhausted and not lost
                if true < size:
                    x, left, size = candidate, computed, true
                if lost:
                    break
        if size <= goal:
            status = Status.CONVERGED
        exhausted = exhausted and size > goal
        if exhausted:
            status = Status.STEPS_USED if size <= _LEFT * system.target else Status.DIVERGED
        report = Report(
            status,
            steps,
            steps,
            size,
            damping=self.damping or None,
            curvature=(ritz[0], ritz[-1]) if ritz else None,
            detail=self._detail(system, ritz, exhausted, status is Status.STEPS_USED and not falls),
        )
        return Solution(x, report, residual=None if status.failed else left)

    def _detail(self, system: System, ritz: list[float], exhausted: bool, at_precision: bool) -> str:
        if exhausted:
            return "no unique answer: the curvature is singular, and this is a least-squares solution"
        said = [f"the residual is as small as {_tree.vector_dtype(system.b)} products make it"] * at_precision
        if ritz:
            said.append(no_unique_answer((ritz[0], ritz[-1]), system.eps, self.damping))
        return "; ".join(filter(None, said))


@dataclass(frozen=True, eq=False)
class MINRES(MinimalResidual):
    """Solve (A + δI) x = b by minimal residuals, for a symmetric A that may be indefinite.

        x_k = argmin ‖b − (A + δI) x‖  over  span{b, A b, …, A^{k−1} b}

    The residual never grows. It keeps six vectors besides the solution, for any number of steps. Each step costs one
    product, and the residual one more every ten steps and at the end. If A is singular the answer is a least-squares
    solution: the solve ends when ‖(A + δI) r‖ and rᵀ(A + δI) r are rounding, since further steps would only add
    rounding. If its residual is more than a hundredth of b, there is no solution and the status is *diverged*. At
    weights that are not a minimum of the training loss, the answer is still A⁻¹b, and the report names the negative
    curvature.

    Args:
        max_steps: the largest number of steps; ≥ 1.
        tolerance: the residual, relative to b, to stop at; ≥ 0. Or a function of the number of solves before.
        damping: δ ≥ 0.
        preconditioner: M⁻¹ as a function r ↦ M⁻¹ r of dicts of tensors, symmetric and positive definite; or a
            curvature with an inverse, such as `KFAC`. The residual is then minimal in the norm √(rᵀM⁻¹r).

    Reference: Paige and Saunders (1975); Choi, Paige and Saunders (2011) on singular systems.
    """

    def cycle(
        self, system: System, b: Tree, goal: float, limit: int, precondition: Product | None
    ) -> Iterator[Cycle]:
        # Names as in the paper: Lanczos' α and β, rotations (c, s), the last entries ε, δ̄, γ̄ of the reduced rows.
        # u are the Lanczos vectors of the residuals and v = M⁻¹u those of the solution.
        u, v, size = _lanczos_vectors(_tree.copy(b), precondition)
        before, x, w, w_before = (_tree.zeros_like(b) for _ in range(4))
        beta, phi, delta_bar, epsilon, c, s = 0.0, size, 0.0, 0.0, -1.0, 0.0
        norm, least, exhausted, invariant = 0.0, math.inf, False, False
        alphas: list[float] = []
        betas: list[float] = []
        goal *= size

        def so_far() -> Cycle:
            ritz = [] if precondition is not None else self._ritz(alphas, betas)
            # An invariant space without a solution has an eigenvalue of zero; otherwise the remainder is rounding.
            null = (
                bool(ritz)
                and min(abs(value + self.damping) for value in ritz) <= math.sqrt(system.eps) * norm
            )
            ended = exhausted or (invariant and null and phi > goal)
            met = norm if precondition is None else 0.0
            return Cycle(x, phi / size, met, len(alphas), ended, ritz)

        while size > 0.0 and len(alphas) < limit and phi > goal and not invariant:
            y = add_damping(system.A(v), v, self.damping)
            alpha = _tree.dot(v, y)
            alphas.append(alpha)
            if not math.isfinite(alpha):
                yield Cycle(x, math.nan, norm, len(alphas), False, [])
                return
            y = _tree.add_(_tree.add(y, u, -alpha), before, -beta)
            following, z, after = _lanczos_vectors(y, precondition)
            norm = max(norm, math.hypot(beta, alpha, after))
            delta, gamma_bar = c * delta_bar + s * alpha, s * delta_bar - c * alpha
            old_epsilon, epsilon, delta_bar = epsilon, s * after, -c * after
            # For the residual r before this step, ‖(A + δI) r‖ / ‖r‖ and rᵀ(A + δI) r / ‖r‖²: both are rounding at a
            # least-squares solution. At one small eigenvalue the second is not.
            slope, quotient = math.hypot(gamma_bar, delta_bar), abs(c * gamma_bar)
            exhausted = slope <= math.sqrt(system.eps) * norm and quotient <= 10.0 * system.eps * norm
            if exhausted:
                break
            gamma = math.hypot(gamma_bar, after)
            least = min(least, gamma)
            # Short recurrences lose the residual by a multiple of ε κ² (Sleijpen, van der Vorst and Modersitzki, 2000):
            # the iterate before such a step is kept.
            if math.sqrt(len(alphas)) * system.eps * (norm / least) ** 2 > 0.3 * phi / size:
                yield so_far()
            c, s = gamma_bar / gamma, after / gamma
            new = _tree.add_(_tree.add(v, w_before, -old_epsilon), w, -delta)
            w_before, w = w, _tree.scale_(new, 1.0 / gamma)
            x = _tree.add_(x, w, c * phi)
            phi *= s
            invariant = after <= 10.0 * system.eps * norm
            betas.append(after)
            before, u, v, beta = u, following, z, after
            if len(alphas) % _CHECK_EVERY == 0 and len(alphas) < limit and phi > goal and not invariant:
                yield so_far()
        if size > 0.0:
            yield so_far()

    def _ritz(self, alphas: list[float], betas: list[float]) -> list[float]:
        """The eigenvalues of A on the Krylov space."""
        matrix = torch.diag(torch.tensor(alphas, dtype=torch.float64))
        beside = torch.tensor(betas[: len(alphas) - 1], dtype=torch.float64)
        if len(beside):
            matrix = matrix + torch.diag(beside, 1) + torch.diag(beside, -1)
        values: list[float] = (torch.linalg.eigvalsh(matrix) - self.damping).tolist()
        return values


def _lanczos_vectors(y: Tree, precondition: Product | None) -> tuple[Tree, Tree, float]:
    """The vector y divided by √(yᵀM⁻¹y), M⁻¹ times it, and that norm. Without M⁻¹ both are one tree."""
    if precondition is None:
        size = _tree.norm(y)
        u = _tree.scale_(y, 1.0 / size) if size > 0.0 else y
        return u, u, size
    z = precondition(y)
    size = math.sqrt(max(_tree.dot(y, z), 0.0))
    factor = 1.0 / size if size > 0.0 else 1.0
    return _tree.scale_(y, factor), _tree.scale(z, factor), size
