"""Ridge regression: the hypergradient of the penalty and the tuned penalty, beside their closed forms.

The training loss is L_T = ½ mean (Xw − y)² + ½ exp(λ) ‖w‖². Its minimum is w*(λ) = (XᵀX / n + exp(λ) I)⁻¹ Xᵀy / n.

    python examples/ridge.py
"""

import torch
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]


def val_loss(model: nn.Linear, decay: nn.Module, batch: Batch) -> Tensor:
    return 0.5 * (model(batch[0])[:, 0] - batch[1]).square().mean()


def train_loss(model: nn.Linear, decay: nn.Module, batch: Batch) -> Tensor:
    return val_loss(model, decay, batch) + decay(model)


def best_response(penalty: Tensor, batch: Batch) -> Tensor:
    """w*(λ), which autograd can differentiate in the penalty."""
    x, y = batch
    return torch.linalg.solve(x.T @ x / len(x) + penalty * torch.eye(x.shape[1]), x.T @ y / len(x))


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    truth, x = torch.randn(10), torch.randn(220, 10)
    y = x @ truth + 4.0 * torch.randn(220)
    train, val = (x[:20], y[:20]), (x[20:], y[20:])

    def closed_form(penalty: Tensor) -> Tensor:
        """The validation loss of w*(λ)."""
        return 0.5 * (val[0] @ best_response(penalty, train) - val[1]).square().mean()

    model = nn.Linear(10, 1, bias=False)
    decay = br.hyperparameters.WeightDecay(model, per="global", initial=0.1)
    problem = br.Problem(model, decay, train_loss, val_loss)

    @torch.no_grad()
    def fit(problem: br.Problem, batch: Batch) -> None:
        """Put the weights at their minimum; on larger problems, this is your optimiser."""
        model.weight[0] = best_response(decay.log_decay.exp(), batch)

    fit(problem, train)
    method = br.Implicit(br.Exact())
    found = br.hypergradient(problem, train, val, method)
    log_penalty = decay.log_decay.detach().clone().requires_grad_()
    (right,) = torch.autograd.grad(closed_form(log_penalty.exp()), log_penalty)
    print(f"hypergradient {float(found.total['log_decay']):.10f}, closed form {float(right):.10f}")

    tuner = br.Tuner(problem, fit, torch.optim.Adam(decay.parameters(), 0.1), method)
    history = tuner.fit([train], [val], hyper_steps=120)
    grid = torch.logspace(-3, 1, 401)
    losses = torch.stack([closed_form(penalty) for penalty in grid])
    print(
        f"tuned penalty {float(decay.values()['all']):.3f}, best of a fine grid {grid[losses.argmin()]:.3f}"
    )
    print(f"validation loss {history[-1]['val_loss']:.6f}, best of the grid {losses.min():.6f}")


if __name__ == "__main__":
    main()
