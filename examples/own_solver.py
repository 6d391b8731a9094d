"""Your own solver: gradient descent with the steps of Barzilai and Borwein.

A solver is a frozen dataclass with a method `iterate`. It gets a system whose right-hand side has norm one, and returns
x with a report. Scaling, counting, checks and warm starts are done for it. `testing.check_solver` compares it with the
dense answer on definite, indefinite and singular systems.

    python examples/own_solver.py
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br
from bestresponse.solvers import Report, Solution, Solver, Status, System


def dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum(float((a[name] * b[name]).sum()) for name in a)


def add(a: dict[str, Tensor], b: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: a[name] + factor * b[name] for name in a}


@dataclass(frozen=True, eq=False)
class BarzilaiBorwein(Solver):
    """Solve A x = b by x ← x + (rᵀr / rᵀA r) r, with the step length of the previous iterate: it needs three vectors.

    Args:
        max_steps: the largest number of steps, one product each.
        tolerance: the relative residual to stop at.

    Reference: Barzilai and Borwein (1988).
    """

    max_steps: int = 100
    tolerance: float = 1e-7

    def iterate(self, system: System) -> Solution:
        x, r = add(system.b, system.b, -1.0), system.b
        goal = max(self.tolerance, 4.0 * system.eps) * system.target  # below it there is only rounding
        earlier, best, smallest, status, number = 0.0, x, 1.0, Status.STEPS_USED, 0
        while number < self.max_steps and smallest > goal:
            number += 1
            product = system.A(r)
            square, curvature = dot(r, r), dot(r, product)
            if not math.isfinite(curvature) or curvature <= 0.0:
                status = Status.NEGATIVE_CURVATURE if math.isfinite(curvature) else Status.NOT_FINITE
                break
            steepest = square / curvature
            step = earlier or steepest
            x, r = add(x, r, step), add(r, product, -step)
            earlier = steepest
            size = math.sqrt(dot(r, r))
            if size < smallest:
                best, smallest = x, size
        # The residual that is reported is computed from x: without damping, and at any size.
        residual, left = system.compute(best, damping=0.0, floor=0.0, goal=goal)
        if residual <= 2.0 * goal and not status.failed:
            status = Status.CONVERGED
        return Solution(best, Report(status, number, number, residual), residual=left)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    br.testing.check_solver(BarzilaiBorwein())
    print("BarzilaiBorwein agrees with the dense answer.")

    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=0.1)
    fit = lambda m, h, b: F.mse_loss(m(b[0]), b[1])  # noqa: E731
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit)
    train, val = [(torch.randn(50, 8), torch.randn(50, 1)) for _ in range(2)]
    for solver in (BarzilaiBorwein(), br.Exact()):
        print(type(solver).__name__, br.hypergradient(problem, train, val, br.Implicit(solver)))


if __name__ == "__main__":
    main()
