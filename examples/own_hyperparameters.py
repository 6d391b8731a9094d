"""A module of hyperparameters of your own: an elastic net with bounds and derivatives that it knows.

Any `torch.nn.Module` with trainable parameters will do. One that knows more about itself offers methods, which
`hyperparameters.protocol` lists: bounds, ranges to search, its curvature, its kinks. `testing.check_hyperparameters`
checks those that it offers.

    python examples/own_hyperparameters.py
"""

import torch
from torch import Tensor, nn

import bestresponse as br


class ElasticNet(nn.Module):
    """Ω(w, λ) = exp(λ₁) Σ|w_i| + ½ exp(λ₂) Σ w_i², for all weights of a model.

    Args:
        l1, l2: exp(λ₁) and exp(λ₂) to begin with.
    """

    def __init__(self, l1: float = 0.01, l2: float = 0.01) -> None:
        super().__init__()
        self.log_l1 = nn.Parameter(torch.tensor(l1).log())
        self.log_l2 = nn.Parameter(torch.tensor(l2).log())

    def forward(self, model: nn.Module) -> Tensor:
        weights = list(model.parameters())
        absolute = torch.stack([w.abs().sum() for w in weights]).sum()
        squares = torch.stack([w.square().sum() for w in weights]).sum()
        return self.log_l1.exp() * absolute + 0.5 * self.log_l2.exp() * squares

    @torch.no_grad()
    def curvature_diagonal(self, model: nn.Module) -> dict[str, Tensor]:
        """∂²Ω/∂w_i² = exp(λ₂): `GaussNewton(..., rest=net)` needs no second backward pass through Ω."""
        return {name: self.log_l2.exp().expand(w.shape) for name, w in model.named_parameters()}

    @torch.no_grad()
    def mixed_product(self, model: nn.Module, v: dict[str, Tensor]) -> dict[str, Tensor]:
        """V · ∂²Ω/∂w∂λ: exp(λ₁) Σ v_i sign w_i and exp(λ₂) Σ v_i w_i."""
        pairs = [(w, v[name]) for name, w in model.named_parameters() if name in v]
        along = torch.stack([(x * w.sign()).sum() for w, x in pairs]).sum()
        return {
            "log_l1": self.log_l1.exp() * along,
            "log_l2": self.log_l2.exp() * torch.stack([(x * w).sum() for w, x in pairs]).sum(),
        }

    @torch.no_grad()
    def rates_at_zero(self, model: nn.Module) -> dict[str, Tensor]:
        """exp(λ₁): with it `Tuner` lets weights come to zero, and hypergradients know that they do not respond."""
        return {name: self.log_l1.exp() for name, _ in model.named_parameters()}

    @torch.no_grad()
    def project_(self) -> None:
        """Keep both rates between exp(-12) and 10; `Tuner` calls this after each of its steps."""
        for p in self.parameters():
            p.clamp_(-12.0, 2.3)

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Where `br.search` looks for them."""
        return {"log_l1": (-12.0, 2.3), "log_l2": (-12.0, 2.3)}


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, net = nn.Linear(30, 1), ElasticNet()
    br.testing.check_hyperparameters(net, model)
    print("ElasticNet knows its curvature, its mixed term and its kinks.")

    truth = torch.zeros(30, 1)
    truth[:3] = 2.0
    train, val = [(x, x @ truth + torch.randn(40, 1)) for x in torch.randn(2, 40, 30)]
    fit = lambda m, h, b: (m(b[0]) - b[1]).square().mean()  # noqa: E731
    problem = br.Problem(model, net, lambda m, h, b: fit(m, h, b) + h(m), fit)
    tuner = br.Tuner(
        problem,
        torch.optim.SGD(problem.weights.values(), 0.05),
        torch.optim.Adam(problem.hyperparameters.values(), 0.05),
        br.Implicit(),
        weight_steps=20,
        warmup_steps=200,
    )
    history = tuner.fit([train], [val], hyper_steps=100)
    zeros = int((model.weight == 0).sum())
    print(f"validation loss {history[0]['val_loss']:.3f} → {history[-1]['val_loss']:.3f}")
    print(f"{zeros} of 30 weights are zero; l1 = {net.log_l1.exp():.3g}, l2 = {net.log_l2.exp():.3g}")


if __name__ == "__main__":
    main()
