"""A linear system solved along a run, by single steps of stochastic gradient descent."""

import math
from dataclasses import dataclass
from typing import Any

from .. import _tree
from .._tree import Tree
from ..errors import require, require_integer, require_number
from .base import Solver, Wants
from .system import Report, Solution, Status, System

# If the residual grows by more within a call, the step size is too large to converge.
_GROWTH = 2.0


@dataclass(frozen=True, eq=False)
class SOBA(Solver):
    """x ← x − ρ_k (A_k x − b_k), a few steps a call, from the solution of the last call: single-loop optimisation.

    A_k and b_k are those of the call's batches, so along a run it is stochastic gradient descent on
    ½ xᵀA x − bᵀx. It is meant for ``Implicit(SOBA(), warm_start=True)`` with one weight step for each hyper-step. A
    start is kept unless its residual on the present batch exceeds a hundred times that of zero. From zero it is
    the series ``Neumann(steps - 1, scale=ρ)``.

    Args:
        steps: the number of steps in a call; ≥ 1. Each step costs a product; the first one is free without a start,
            since it uses the start's residual.
        step_size: ρ > 0. None takes 0.5 / λ_max, estimated with eight power-iteration products at first and one
            in each later call.
        decay: c ≥ 0 in ρ_k = ρ / (1 + c k), where k counts the steps of the run. Zero keeps a constant step; the
            error then stays at a level set by the noise of the batches.
        fresh_batches: whether each step takes the next of the training `Batches` for its product.

    Reference: Dagréou, Ablin, Vaiter and Moreau (2022), the stochastic bilevel algorithm SOBA.
    """

    steps: int = 1
    step_size: float | None = None
    decay: float = 0.0
    fresh_batches: bool = False

    needs_definite = False
    spoiled = 100.0

    def __post_init__(self) -> None:
        require_integer("SOBA.steps", self.steps, 1)
        if self.step_size is not None:
            require_number("SOBA.step_size", self.step_size)
            required = "positive and finite, or None"
            require(0 < self.step_size < math.inf, "SOBA.step_size", required, self.step_size)
        require_number("SOBA.decay", self.decay)
        require(0 <= self.decay < math.inf, "SOBA.decay", "≥ 0 and finite", self.decay)

    @property
    def wants(self) -> Wants:
        return Wants(fresh_batches=self.fresh_batches, start="required")

    def iterate(self, system: System) -> Solution:
        memory: dict[str, Any] = {**system.memory, "count": system.memory.get("count", 0)}
        zero = _tree.zeros_like(system.b)
        if system.dropped is not None:
            status = Status.DIVERGED if math.isfinite(system.dropped) else Status.NOT_FINITE
            detail = f"the residual grew to {system.dropped:.2g} times that of zero; begun again: use a smaller step"
            return Solution(zero, Report(status, 0, 0, 1.0, scale=self.step_size, detail=detail), memory)
        step_size, earlier = self.step_size, 0.0
        if step_size is None:
            top, memory["vector"] = system.largest_curvature(1)
            if not math.isfinite(top):
                return Solution(zero, Report(Status.NOT_FINITE, 0, 0, 1.0), dict(system.memory))
            step_size = 0.5 / top if top > 0.0 else 1.0
        x, r = _tree.copy(zero), system.b
        size, length, status = 1.0, 1.0, Status.STEPS_USED
        for step in range(self.steps):
            rate = step_size / (1.0 + self.decay * memory["count"])
            if step:
                # With another batch, the residual of the whole x changes.
                r = (
                    system.residual(x, 0.0, 1.0)
                    if self.fresh_batches
                    else _tree.add(r, system.A(r), -earlier)
                )
                size = _tree.norm(r)
            if not size <= (self.spoiled if self.fresh_batches else _GROWTH):
                status = Status.DIVERGED if math.isfinite(size) else Status.NOT_FINITE
                x, size = zero, 1.0
                break
            _tree.add_(x, r, rate)
            earlier = rate
            length += size
            memory["count"] += 1
        # The residual before the last step, as with `Neumann`.
        known: float | None = size
        left: Tree | None = r
        if self.fresh_batches:
            known = left = None
        elif size <= 10.0 * system.eps * length:  # rounding
            known, left = system.compute(x, 0.0, 0.0, 0.0)
        report = Report(status, self.steps - 1, self.steps, known, scale=step_size)
        return Solution(x, report, memory, None if status.failed else left)
