"""An equality constraint below: how far to shrink a covariance before a portfolio is chosen.

The portfolio of least variance has shares that sum to one:  w*(λ) = argmin ½ wᵀC(λ)w  subject to  Σ w_i = 1,  with the
shrunk covariance C(λ) = (1 − s) S + s mean(diag S) I and s = sigmoid(λ). The weights here are the shares and a
multiplier ν: the training loss is the Lagrangian, and the solution is its *stationary point*, which is a saddle and
no minimum. So the curvature is indefinite. `MINRES`, `GMRES` and `Exact` solve such systems. `Implicit()` and other
methods for minima do not: they damp the negative direction away, and their answer is far off. Gradient descent does not
train such weights either. The report's "no unique answer: negative curvature" is meant for minima, and is wrong here.

    python examples/equality_constraint.py
"""

import torch
from torch import Tensor, nn

import bestresponse as br

ASSETS = 15


class Portfolio(nn.Module):
    """Shares w and the multiplier ν of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = nn.Parameter(torch.full((ASSETS,), 1.0 / ASSETS))
        self.multiplier = nn.Parameter(torch.zeros(()))


class Shrinking(nn.Module):
    """How far a covariance is shrunk towards a multiple of the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.tensor(-3.0))

    def forward(self, covariance: Tensor) -> Tensor:
        s = self.logit.sigmoid()
        return (1.0 - s) * covariance + s * covariance.diag().mean() * torch.eye(ASSETS)


def lagrangian(portfolio: Portfolio, shrinking: Shrinking, covariance: Tensor) -> Tensor:
    w = portfolio.shares
    return 0.5 * w @ shrinking(covariance) @ w + portfolio.multiplier * (w.sum() - 1.0)


def new_variance(portfolio: Portfolio, shrinking: Shrinking, covariance: Tensor) -> Tensor:
    return portfolio.shares @ covariance @ portfolio.shares


@torch.no_grad()
def solve(problem: br.Problem, covariance: Tensor) -> None:
    """The stationary point of the Lagrangian, from its linear equations."""
    direction = torch.linalg.solve(problem.hyper(covariance), torch.ones(ASSETS))
    problem.model.shares.copy_(direction / direction.sum())
    problem.model.multiplier.copy_(-1.0 / direction.sum())


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    market = 1.0 + 0.3 * torch.randn(ASSETS)  # how each asset follows the market

    def observed(days: int) -> Tensor:
        return torch.cov((torch.randn(days, 1) * market + torch.randn(days, ASSETS)).T)

    past, later, new = observed(20), observed(60), observed(100_000)

    portfolio, shrinking = Portfolio(), Shrinking()
    problem = br.Problem(portfolio, shrinking, lagrangian, new_variance)
    solve(problem, past)
    before = float(new_variance(portfolio, shrinking, new).detach())

    found = br.hypergradient(problem, past, later, br.Implicit(br.MINRES(2 * ASSETS)))
    sides = []
    for step in (1e-4, -1e-4):  # solve again on both sides
        with torch.no_grad():
            shrinking.logit += step
            solve(problem, past)
            sides.append(float(new_variance(portfolio, shrinking, later)))
            shrinking.logit -= step
    solve(problem, past)
    print(
        f"hypergradient {float(found.total['logit']):.8f}, by solving again {(sides[0] - sides[1]) / 2e-4:.8f}"
    )

    tuner = br.Tuner(
        problem, solve, torch.optim.Adam(shrinking.parameters(), 0.1), br.Implicit(br.MINRES(2 * ASSETS))
    )
    tuner.fit([past], [later], hyper_steps=80)
    solve(problem, past)
    after = float(new_variance(portfolio, shrinking, new).detach())
    print(
        f"shrunk by {float(shrinking.logit.detach().sigmoid()):.3f}; the shares sum to {portfolio.shares.sum():.12f}"
    )
    print(f"variance on new data {before:.4f} → {after:.4f}")


if __name__ == "__main__":
    main()
