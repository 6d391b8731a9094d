"""A solver of your own: gradient descent with the steps of Barzilai and Borwein.

A solver is a frozen dataclass with a method `iterate`. It gets a system whose right-hand side has norm one, and returns
x with a report. Scaling, counting, checks and warm starts are done for it. `testing.check_solver` compares it with the
dense answer on definite, indefinite and singular systems.

    python examples/own_solver.py
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
from bestresponse import _tree
from bestresponse.solvers import Report, Solution, Solver, Status, System


@dataclass(frozen=True, eq=False)
class BarzilaiBorwein(Solver):
    """Solve A x = b by x ← x + (rᵀr / rᵀA r) r, with the step of the iterate before: it needs three vectors.

    Args:
        max_steps: the largest number of steps, one product each.
        tolerance: the relative residual to stop at.

    Reference: Barzilai and Borwein (1988).
    """

    max_steps: int = 100
    tolerance: float = 1e-7

    def iterate(self, system: System) -> Solution:
        x, r = _tree.zeros_like(system.b), system.b
        goal = max(self.tolerance, 4.0 * system.eps) * system.target  # below it there is rounding alone
        earlier, best, smallest, status, number = 0.0, _tree.zeros_like(r), 1.0, Status.STEPS_USED, 0
        while number < self.max_steps and smallest > goal:
            number += 1
            product = system.A(r)
            square, curvature = _tree.dot(r, r), _tree.dot(r, product)
            if not math.isfinite(curvature) or curvature <= 0.0:
                status = Status.NEGATIVE_CURVATURE if math.isfinite(curvature) else Status.NOT_FINITE
                break
            steepest = square / curvature
            step = earlier or steepest
            x, r = _tree.add(x, r, step), _tree.add(r, product, -step)
            earlier = steepest
            size = _tree.norm(r)
            if size < smallest:
                best, smallest = x, size
        residual, left = system.compute(
            best, 0.0, 0.0, goal
        )  # *converged* is said of a computed residual only
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
