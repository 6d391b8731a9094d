"""Minimal residuals over the Krylov space: for curvatures that are indefinite, singular or not quite symmetric."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import _tree
from .._tree import Tree
from .base import Solver, Tolerance, at_present, require, require_integer, require_number, require_tolerance
from .preconditioning import Preconditioner, check_preconditioner, given_inverse
from .system import Report, Solution, Status, System, add_damping, no_unique_answer

# What a solve may leave of the right-hand side and still count as one, as for the dense inverse.
_LEFT = 1e-2
_CHECK_EVERY = 10


@dataclass(frozen=True)
class Cycle:
    """One run of the iteration from zero, on a right-hand side of norm one.

    Attributes:
        x: its last iterate.
        residual: the norm of the residual by the recurrence.
        drift: a bound on what rounding can have moved that norm by; infinite where there is none.
        norm: of A + δI, as far as the iteration has met it.
        steps: the steps that it made.
        exhausted: whether no further step can bring the residual down: a least-squares solution.
        ritz: the eigenvalues of A on the Krylov space, in rising order.
    """

    x: Tree
    residual: float
    drift: float
    norm: float
    steps: int
    exhausted: bool
    ritz: list[float]


@dataclass(frozen=True, eq=False)
class MinimalResidual(Solver):
    """What MINRES and GMRES share: arguments, restarts from computed residuals, and the report.

    A subclass writes `cycle`. When a cycle reaches the tolerance by its recurrence, the residual is computed, and
    where rounding has kept that larger, the next cycle starts from it. So the residual falls from cycle to cycle, and
    none is reported that rounding can have made.
    """

    max_steps: int = 20
    tolerance: Tolerance = 1e-6
    damping: float = 0.0
    preconditioner: Any = None

    needs_definite = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_integer(f"{name}.max_steps", self.max_steps, 1)
        require_tolerance(f"{name}.tolerance", self.tolerance)
        require_number(f"{name}.damping", self.damping)
        require(0 <= self.damping < math.inf, f"{name}.damping", "≥ 0 and finite", self.damping)
        check_preconditioner(name, self.preconditioner)

    def shift(self, memory: object) -> float:
        return self.damping

    @abstractmethod
    def cycle(
        self, system: System, b: Tree, goal: float, limit: int, precondition: Preconditioner | None
    ) -> Iterator[Cycle]:
        """At most ``limit`` steps on (A + δI) x = b, where ‖b‖ = 1: what they came to, now and then and at the end.

        A residual of NaN says that a product was not finite.
        """

    def iterate(self, system: System) -> Solution:
        goal = system.target * at_present(self.tolerance)
        precondition = given_inverse(self.preconditioner, system, self.damping)
        x, left, size = _tree.zeros_like(system.b), system.b, 1.0
        steps, exhausted, detail = 0, False, ""
        ritz: list[float] = []
        known: Tree | None = None
        falls = True
        while size > goal and steps < self.max_steps and falls and not exhausted:
            unit = 1.0 if steps == 0 else _tree.norm(left)
            b = left if steps == 0 else _tree.scale(left, 1.0 / unit)
            first, start, begun, opening = not ritz, x, steps, size
            for cycle in self.cycle(system, b, goal / unit, self.max_steps - steps, precondition):
                steps, ritz = begun + cycle.steps, cycle.ritz if first else ritz
                if not math.isfinite(cycle.residual):
                    return Solution(x, Report(Status.NOT_FINITE, steps, steps, size))
                candidate = _tree.add(start, cycle.x, unit)
                claimed = unit * cycle.residual
                # Beyond ten steps a product more is cheap, and rounding has had its time.
                certain = claimed > goal and not cycle.exhausted and cycle.steps <= 10
                floor = system.eps * cycle.norm * (system.offset + _tree.norm(candidate))
                drift = unit * cycle.drift if certain else math.inf
                true, computed = system.settle(candidate, self.damping, claimed, drift, floor, goal)
                lost, falls = true > 1.5 * claimed, true <= 0.5 * opening
                exhausted = cycle.exhausted and not lost
                if true < size:
                    x, size, known = candidate, true, computed
                if lost:
                    break
            if computed is None or steps >= self.max_steps:
                break
            left = computed
            if size > goal and not (falls or exhausted):
                detail = f"the residual is as small as {_tree.vector_dtype(x)} products make it"
        return self._end(system, x, size, steps, exhausted and size > goal, ritz, detail, known)

    def _end(
        self,
        system: System,
        x: Tree,
        residual: float,
        steps: int,
        exhausted: bool,
        ritz: list[float],
        detail: str,
        left: Tree | None,
    ) -> Solution:
        converged = residual <= system.target * at_present(self.tolerance)
        status = Status.CONVERGED if converged else Status.STEP_LIMIT
        if exhausted:
            status = Status.STEP_LIMIT if residual <= _LEFT * system.target else Status.DIVERGED
            detail = "no unique answer: the curvature is singular, and this is a least-squares solution"
        elif ritz and (unanswered := no_unique_answer((ritz[0], ritz[-1]), system.eps)):
            detail = "; ".join(filter(None, (detail, unanswered)))
        report = Report(
            status,
            steps,
            steps,
            residual,
            damping=self.damping or None,
            curvature=(ritz[0], ritz[-1]) if ritz else None,
            detail=detail,
        )
        return Solution(x, report, residual=None if status.failed else left)


@dataclass(frozen=True, eq=False)
class MINRES(MinimalResidual):
    """Solve (A + δI) x = b by minimal residuals, for a symmetric A that may be indefinite.

        x_k = argmin ‖b − (A + δI) x‖  over  span{b, A b, …, A^{k−1} b}

    The residual never grows. Three vectors more than the solution, whatever the steps; one product each, and one more
    where rounding may have moved the residual. Where A is singular the answer is a least-squares solution: the solve
    ends where ‖(A + δI) r‖ ≤ √ε ‖A + δI‖ ‖r‖, since further steps would only add rounding. One that leaves more than a
    hundredth of b is *diverged*, since there is no solution. At weights that are no minimum of the training loss, the
    answer is A⁻¹b all the same, and the report names the negative curvature.

    Args:
        max_steps: the largest number of steps; ≥ 1.
        tolerance: the residual, relative to b, to stop at; ≥ 0. Or a function of the number of solves before.
        damping: δ ≥ 0.
        preconditioner: M⁻¹ as a function r ↦ M⁻¹ r of dicts of tensors, symmetric and positive definite; or a
            curvature with an inverse, such as `KFAC`. The residual is then minimal in the norm √(rᵀM⁻¹r).

    Reference: Paige and Saunders (1975); Choi, Paige and Saunders (2011) on singular systems.
    """

    def cycle(
        self, system: System, b: Tree, goal: float, limit: int, precondition: Preconditioner | None
    ) -> Iterator[Cycle]:
        # Names as in the paper: Lanczos' α and β, rotations (c, s), the last entries ε, δ̄, γ̄ of the reduced rows.
        # u are the Lanczos vectors of the residuals and v = M⁻¹u those of the solution.
        u, v, size = _lanczos_vectors(_tree.copy(b), precondition)
        before, x, w, w_before = (_tree.zeros_like(b) for _ in range(4))
        beta, phi, delta_bar, epsilon, c, s = 0.0, size, 0.0, 0.0, -1.0, 0.0
        norm, least, exhausted = 0.0, math.inf, False
        alphas: list[float] = []
        betas: list[float] = []
        goal *= size
        while size > 0.0 and len(alphas) < limit and phi > goal and not exhausted:
            y = add_damping(system.A(v), v, self.damping)
            alpha = _tree.dot(v, y)
            alphas.append(alpha)
            if not math.isfinite(alpha):
                yield Cycle(x, math.nan, math.inf, norm, len(alphas), False, [])
                return
            y = _tree.add_(_tree.add(y, u, -alpha), before, -beta)
            following, z, after = _lanczos_vectors(y, precondition)
            norm = max(norm, math.hypot(beta, alpha, after))
            delta, gamma_bar = c * delta_bar + s * alpha, s * delta_bar - c * alpha
            old_epsilon, epsilon, delta_bar = epsilon, s * after, -c * after
            # ‖(A + δI) r‖ / ‖r‖ of the iterate before this step: at a least-squares solution it is rounding.
            exhausted = math.hypot(gamma_bar, delta_bar) <= math.sqrt(system.eps) * norm
            if exhausted:
                break
            gamma = math.hypot(gamma_bar, after)
            least = min(least, gamma)
            c, s = gamma_bar / gamma, after / gamma
            new = _tree.add_(_tree.add(v, w_before, -old_epsilon), w, -delta)
            w_before, w = w, _tree.scale_(new, 1.0 / gamma)
            x = _tree.add_(x, w, c * phi)
            phi *= s
            exhausted = after <= 10.0 * system.eps * norm
            betas.append(after)
            before, u, v, beta = u, following, z, after
            if len(alphas) % _CHECK_EVERY == 0 and phi > goal:
                yield self._so_far(x, phi / size, norm, least, False, alphas, betas, system, precondition)
        yield self._so_far(
            x, phi / size, norm, least, exhausted and phi > goal, alphas, betas, system, precondition
        )

    def _so_far(
        self,
        x: Tree,
        phi: float,
        norm: float,
        least: float,
        exhausted: bool,
        alphas: list[float],
        betas: list[float],
        system: System,
        precondition: Preconditioner | None,
    ) -> Cycle:
        steps, ritz = len(alphas), self._ritz(alphas, betas)
        if precondition is not None:  # norms and curvatures are those of M⁻¹A, and so is the residual
            return Cycle(x, phi, math.inf, 0.0, steps, exhausted, ritz)
        # Short recurrences lose the residual by a multiple of ε κ² (Sleijpen, van der Vorst and Modersitzki, 2000).
        drift = system.eps * math.sqrt(steps) * (norm / least) ** 2 if steps else 0.0
        return Cycle(x, phi, drift, norm, steps, exhausted, ritz)

    def _ritz(self, alphas: list[float], betas: list[float]) -> list[float]:
        """The eigenvalues of A on the Krylov space."""
        matrix = torch.diag(torch.tensor(alphas, dtype=torch.float64))
        beside = torch.tensor(betas[: len(alphas) - 1], dtype=torch.float64)
        if len(beside):
            matrix = matrix + torch.diag(beside, 1) + torch.diag(beside, -1)
        values: list[float] = (torch.linalg.eigvalsh(matrix) - self.damping).tolist()
        return values


def _lanczos_vectors(y: Tree, precondition: Preconditioner | None) -> tuple[Tree, Tree, float]:
    """Y over its norm √(yᵀM⁻¹y), M⁻¹ of that, and the norm. Without a preconditioner both are one tree."""
    if precondition is None:
        size = _tree.norm(y)
        u = _tree.scale_(y, 1.0 / size) if size > 0.0 else y
        return u, u, size
    z = precondition(y)
    size = math.sqrt(max(_tree.dot(y, z), 0.0))
    factor = 1.0 / size if size > 0.0 else 1.0
    return _tree.scale_(y, factor), _tree.scale(z, factor), size
