"""Meta-learning of an initialisation, over many tasks at once (implicit MAML).

    w_t*(θ) = argmin_w L_t(w) + ½ ρ ‖w − θ‖²,    θ* = argmin_θ mean_t L_t'(w_t*(θ))

The weights of all tasks are one stacked tensor, and the centre θ that they share is the hyperparameter. The curvature
is block-diagonal, a block for each task. No product mixes tasks, so one solve serves all of them.

    python examples/meta_learning.py
"""

import torch
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]  # [tasks, examples, inputs] and [tasks, examples]
TASKS, EXAMPLES, INPUTS, PULL = 50, 5, 10, 0.3


class Learners(nn.Module):
    """The weights of each task."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(TASKS, INPUTS))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w[:, :, None])[..., 0]


class Centre(nn.Module):
    """What the tasks share."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(INPUTS))


def query_loss(learners: Learners, centre: Centre, batch: Batch) -> Tensor:
    return 0.5 * (learners(batch[0]) - batch[1]).square().mean()


def support_loss(learners: Learners, centre: Centre, batch: Batch) -> Tensor:
    pull = 0.5 * PULL * (learners.w - centre.theta).square().sum(1).mean()
    return query_loss(learners, centre, batch) + pull


def best_response(theta: Tensor, batch: Batch) -> Tensor:
    """The weights of all tasks in closed form."""
    x, y = batch
    n, d = x.shape[1:]
    matrix = x.mT @ x / n + PULL * torch.eye(d)
    return torch.linalg.solve(matrix, (x.mT @ y[..., None])[..., 0] / n + PULL * theta)


def draw(shared: Tensor) -> tuple[Batch, Batch]:
    """The support and the query examples of tasks whose true weights lie around the shared ones."""
    truth = shared + 0.3 * torch.randn(TASKS, INPUTS)
    x = torch.randn(TASKS, 2 * EXAMPLES, INPUTS)
    y = (x @ truth[:, :, None])[..., 0] + 0.3 * torch.randn(TASKS, 2 * EXAMPLES)
    return (x[:, :EXAMPLES], y[:, :EXAMPLES]), (x[:, EXAMPLES:], y[:, EXAMPLES:])


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    shared = torch.randn(INPUTS)
    (support, query), (new_support, new_query) = draw(shared), draw(shared)
    learners, centre = Learners(), Centre()
    problem = br.Problem(learners, centre, support_loss, query_loss)

    def closed_form(theta: Tensor, support: Batch, query: Batch) -> Tensor:
        w = best_response(theta, support)
        return 0.5 * ((query[0] @ w[:, :, None])[..., 0] - query[1]).square().mean()

    with torch.no_grad():
        learners.w.copy_(best_response(centre.theta, support))
    found = br.hypergradient(problem, support, query, br.Implicit(br.ConjugateGradient(50, tolerance=1e-10)))
    (right,) = torch.autograd.grad(closed_form(centre.theta, support, query), centre.theta)
    error = float((found.total["theta"] - right).norm() / right.norm())
    print(f"hypergradient: relative distance from the closed form {error:.0e}")

    tuner = br.Tuner(
        problem,
        torch.optim.SGD(learners.parameters(), 10.0),  # losses are means over 50 tasks, so steps are long
        torch.optim.Adam(centre.parameters(), 0.1),
        weight_steps=5,
    )
    tuner.fit([support], [query], hyper_steps=120)
    starts = {"zero": torch.zeros(INPUTS), "tuned": centre.theta.detach(), "truth": shared}
    for name, theta in starts.items():
        loss = float(closed_form(theta, new_support, new_query))
        print(f"loss of new tasks after {EXAMPLES} examples each, from the {name} centre: {loss:.3f}")


if __name__ == "__main__":
    main()
