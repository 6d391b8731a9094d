"""The lasso: weights that the penalty holds at zero do not respond, and the hypergradient leaves them out.

The training loss is L_T = ½ mean (Xw − y)² + exp(λ) Σ |w_i|. The weights that are
not zero, the support S, respond:

    ∂w_S/∂λ = −exp(λ) (X_SᵀX_S / n)⁻¹ sign w_S

The tuned penalty stands beside the best one of scikit-learn's path of 1,000 penalties.

    pip install scikit-learn
    python examples/lasso.py
"""

import torch
from sklearn.linear_model import lasso_path
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]


def val_loss(model: nn.Linear, penalty: nn.Module, batch: Batch) -> Tensor:
    return 0.5 * (model(batch[0])[:, 0] - batch[1]).square().mean()


def train_loss(model: nn.Linear, penalty: nn.Module, batch: Batch) -> Tensor:
    return val_loss(model, penalty, batch) + penalty(model)


def closed_form(model: nn.Linear, rate: float, train: Batch, val: Batch) -> float:
    """The hypergradient of the lasso at its solution."""
    w, (x, _) = model.weight[0].detach(), train
    kept = w != 0
    response = -rate * torch.linalg.solve(x[:, kept].T @ x[:, kept] / len(x), w[kept].sign())
    slope = val[0].T @ (val[0] @ w - val[1]) / len(val[0])
    return float(slope[kept] @ response)


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    truth = torch.cat([torch.full((5,), 1.0), torch.zeros(45)])
    x = torch.randn(480, 50)
    y = x @ truth + 2.0 * torch.randn(480)
    train, val = (x[:80], y[:80]), (x[80:], y[80:])

    model = nn.Linear(50, 1, bias=False)
    nn.init.zeros_(model.weight)
    penalty = br.hyperparameters.WeightDecay(model, power=1, initial=0.05)
    problem = br.Problem(model, penalty, train_loss, val_loss)
    hyper_optimizer = torch.optim.Adam(penalty.parameters(), 0.15)
    # Tuner keeps each step within its orthant, so that weights stop at exactly zero.
    tuner = br.Tuner(
        problem,
        torch.optim.SGD(model.parameters(), 0.5),
        hyper_optimizer,
        br.Implicit(br.Exact()),
        weight_steps=10,
        warmup_steps=200,
        hyper_scheduler=torch.optim.lr_scheduler.ExponentialLR(hyper_optimizer, 0.95),
    )
    history = tuner.fit([train], [val], hyper_steps=60)

    tuner.retrain([train], 300, lambda model: None)  # further steps of the weights alone
    rate = float(penalty.values()["all"])
    found = br.hypergradient(problem, train, val, br.Implicit(br.Exact()))
    print(f"hypergradient {float(found.total['log_decay']):.8f}, closed form ", end="")
    print(f"{closed_form(model, rate, train, val):.8f}")

    rates, path, _ = lasso_path(*(t.numpy() for t in train), alphas=1000, eps=1e-2, tol=1e-8)
    losses = 0.5 * (val[0] @ torch.tensor(path) - val[1][:, None]).square().mean(0)
    best = int(losses.argmin())
    print(f"tuned penalty {rate:.4f}, best of scikit-learn's path {rates[best]:.4f}")
    print(f"validation loss {history[-1]['val_loss']:.5f}, best of the path {losses[best]:.5f}")
    zeros = int((model.weight == 0).sum())
    print(f"{zeros} of 50 weights are exactly zero, on the path {int((path[:, best] == 0).sum())}")


if __name__ == "__main__":
    main()
