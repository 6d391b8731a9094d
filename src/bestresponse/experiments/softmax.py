"""Softmax regression with an ℓ2 penalty, solved until the gradient is at rounding level.

minimise over W [C, D + 1] (the last column is the bias):  cross-entropy(W x̃, y) + penalty/2 ‖W‖²
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br

from .minimise import minimise

_NEWTON_STEPS = 50
_PRECISION = 1e-9


class ExactSoftmax:
    """A weight step for `Tuner` that sets a linear classifier to the minimiser on the examples of ``problem.hyper()``.

    There are far fewer examples than inputs, and the minimiser lies in their span. Newton's method therefore uses an
    orthonormal basis of the span, x̃ = Q z with N values in z. It runs in float64 and starts at the last solution.

    Attributes:
        gradient_norm: ‖∂L_T/∂W‖ at the solution.
    """

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty
        self.gradient_norm = float("nan")
        self._last: Tensor | None = None

    def __call__(self, problem: br.Problem, batch: object) -> None:
        inputs, targets = problem.hyper()
        layer = problem.model
        assert isinstance(layer, nn.Linear)
        w = self.solve(inputs.detach(), targets.detach(), layer.out_features)
        with torch.no_grad():
            layer.weight.copy_(w[:, :-1])
            layer.bias.copy_(w[:, -1])

    def solve(self, inputs: Tensor, targets: Tensor, classes: int) -> Tensor:
        """W [C, D + 1] for examples of any shape [N, ...], and classes [N] or probabilities [N, C]."""
        x = extended(inputs.double())
        if targets.ndim == 1:
            targets = F.one_hot(targets, classes)
        basis, triangle = torch.linalg.qr(x.T)
        start = x.new_zeros(classes, x.shape[1]) if self._last is None else self._last
        v, self.gradient_norm = _newton(triangle.T, targets.double(), self.penalty, start @ basis)
        self._last = v @ basis.T
        return self._last


def loss(x: Tensor, targets: Tensor, w: Tensor, penalty: float) -> Tensor:
    """Cross-entropy of the logits x Wᵀ with classes [N] or probabilities [N, C], plus penalty/2 ‖W‖²."""
    return F.cross_entropy(x @ w.T, targets) + penalty / 2 * w.square().sum()


def _newton(z: Tensor, targets: Tensor, penalty: float, v: Tensor) -> tuple[Tensor, float]:
    """V [C, N] with logits z Vᵀ, by Newton steps; conjugate gradient solves their systems."""
    solver = br.ConjugateGradient(max_steps=500, tolerance=1e-3)

    for _ in range(_NEWTON_STEPS):
        p = (z @ v.T).softmax(dim=1)
        gradient = (p - targets).T @ z / len(z) + penalty * v
        if gradient.norm() < _PRECISION:
            break

        def product(u: dict[str, Tensor], p: Tensor = p) -> dict[str, Tensor]:
            d = z @ u["v"].T
            return {"v": (p * (d - (p * d).sum(dim=1, keepdim=True))).T @ z / len(z) + penalty * u["v"]}

        step = solver.solve(product, {"v": gradient}).x["v"]
        size, before, slope = 1.0, loss(z, targets, v, penalty), (step * gradient).sum()
        while loss(z, targets, v - size * step, penalty) > before - 1e-4 * size * slope and size > 1e-6:
            size /= 2
        v = v - size * step
    return v, float(gradient.norm())


def fit(
    inputs: Tensor, targets: Tensor, classes: int, penalty: float, steps: int = 300
) -> tuple[Tensor, float]:
    """W [C, D + 1] by L-BFGS from zero, and the norm of its gradient, for any number of examples."""
    x = extended(inputs)
    w = x.new_zeros(classes, x.shape[1]).requires_grad_()
    until = {"tolerance_grad": 1e-9, "tolerance_change": 0.0}
    gradient_norm = minimise(lambda: loss(x, targets, w, penalty), [w], steps, **until)
    return w.detach(), gradient_norm


def accuracy(w: Tensor, inputs: Tensor, labels: Tensor) -> float:
    """The share of correctly classified examples."""
    return float((extended(inputs.to(w.dtype)) @ w.T).argmax(dim=1).eq(labels).float().mean())


def extended(inputs: Tensor) -> Tensor:
    """Flat examples with a 1 appended, [N, D + 1]."""
    flat = inputs.flatten(1)
    return torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1)
