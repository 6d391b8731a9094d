"""Problems with known answers: the table that every method and curvature is run against."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br


@dataclass
class Case:
    """A problem at a stationary point of its training loss, and its exact hypergradient there."""

    problem: br.Problem
    train: Any
    val: Any
    expected: dict[str, torch.Tensor]


class Rates(nn.Module):
    """A logarithmic decay for each weight and a scale of a direct term: both terms are non-zero."""

    def __init__(self, shape, log_decay):
        super().__init__()
        self.log_decay = nn.Parameter(torch.linspace(log_decay - 1, log_decay + 1, shape.numel()).view(shape))
        self.shift = nn.Parameter(torch.tensor(0.3))


def ridge(log_decay=-1.0) -> Case:
    """Ridge regression: w*(λ) = (XᵀX/n + diag e^λ)⁻¹ Xᵀy/n; λ and a shift enter L_V directly as well."""
    x, y, x_val, y_val = torch.randn(20, 5), torch.randn(20), torch.randn(15, 5), torch.randn(15)
    model = nn.Linear(5, 1, bias=False)
    hyper = Rates(model.weight.shape, log_decay)

    def train_loss(model, hyper, batch):
        fit = (model(batch[0])[:, 0] - batch[1]).square().mean() / 2
        return fit + (hyper.log_decay.exp() * model.weight.square()).sum() / 2

    def val_loss(model, hyper, batch):
        fit = (model(batch[0])[:, 0] - batch[1] - hyper.shift).square().mean() / 2
        return fit + 0.05 * hyper.log_decay.square().sum()

    def response(log_decay):
        curvature = x.T @ x / len(x) + torch.diag(log_decay.exp().view(-1))
        return torch.linalg.solve(curvature, x.T @ y / len(x)).view(1, 5)

    with torch.no_grad():
        model.weight.copy_(response(hyper.log_decay))
    fit = (x_val @ response(hyper.log_decay)[0] - y_val - hyper.shift).square().mean() / 2
    loss = fit + 0.05 * hyper.log_decay.square().sum()
    exact = torch.autograd.grad(loss, [hyper.log_decay, hyper.shift])
    problem = br.Problem(model, hyper, train_loss, val_loss)
    return Case(problem, (x, y), (x_val, y_val), dict(zip(["log_decay", "shift"], exact, strict=True)))


def softmax(log_decay=-2.0) -> Case:
    """Softmax regression, solved to 1e-12 by Newton's method; the expected values are differences of that."""
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    x_val, y_val = torch.randn(25, 4), torch.randint(3, (25,))
    model = nn.Linear(4, 3)
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=float(torch.tensor(log_decay).exp()))

    def train_loss(model, decay, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + decay(model)

    def val_loss(model, decay, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    problem = br.Problem(model, decay, train_loss, val_loss)

    def solved_val_loss():
        newton(problem, (x, y))
        return val_loss(model, decay, (x_val, y_val)).detach()

    expected = {}
    step = 1e-3
    for name, parameter in problem.hyperparameters.items():
        total = 0.0
        for shift, factor in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
            with torch.no_grad():
                parameter += shift * step
            total = total + factor * solved_val_loss() / (12 * step)
            with torch.no_grad():
                parameter -= shift * step
        expected[name] = torch.as_tensor(total)
    newton(problem, (x, y))
    return Case(problem, (x, y), (x_val, y_val), expected)


def newton(problem: br.Problem, batch) -> None:
    """Minimise the training loss to rounding, over all weights."""
    weights = list(problem.weights.values())
    for _ in range(30):
        loss = problem.train_loss(problem.model, problem.hyper, batch)
        gradient = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, weights, create_graph=True)])
        rows = [torch.autograd.grad(g, weights, retain_graph=True) for g in gradient]
        hessian = torch.stack([torch.cat([p.reshape(-1) for p in row]) for row in rows])
        step = torch.linalg.solve(hessian, gradient.detach())
        with torch.no_grad():
            for w, piece in zip(weights, step.split([w.numel() for w in weights]), strict=True):
                w -= piece.view(w.shape)
        if float(gradient.detach().norm()) < 1e-13:
            return
    raise AssertionError(f"Newton's method did not converge: {float(gradient.detach().norm())}")


def train(problem: br.Problem, batch, optimizer, steps: int) -> None:
    """So many plain steps on one batch."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss = problem.train_loss(problem.model, problem.hyper, batch)
        loss.backward(inputs=list(problem.weights.values()))
        optimizer.step()
    optimizer.zero_grad()


class Cube(torch.autograd.Function):
    """x³, without a second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def network(hidden: nn.Module | None = None, decayed: bool = True) -> tuple[br.Problem, Any, Any]:
    """A small smooth network with a decay for each weight, away from any stationary point.

    Its Hessian is indefinite; with the first layer alone decayed it is singular (softmax has one
    degree of freedom too many), and with ``decayed`` it is not.
    """
    model = nn.Sequential(nn.Linear(3, 4), hidden or nn.Identity(), nn.Tanh(), nn.Linear(4, 2))
    decay = br.hyperparameters.WeightDecay(model, initial=0.05, exclude=() if decayed else ("3.*",))
    with torch.no_grad():
        for parameter in decay.parameters():
            parameter += 0.5 * torch.randn_like(parameter)

    def train_loss(model, decay, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + decay(model)

    def val_loss(model, decay, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    train = (torch.randn(12, 3), torch.randint(2, (12,)))
    val = (torch.randn(10, 3), torch.randint(2, (10,)))
    return br.Problem(model, decay, train_loss, val_loss), train, val


EXACT_CASES: dict[str, Callable[[], Case]] = {
    "ridge, weak decay": lambda: ridge(-3.0),
    "ridge, strong decay": lambda: ridge(-0.5),
    "softmax, weak decay": lambda: softmax(-3.0),
    "softmax, strong decay": lambda: softmax(-1.0),
}


class Around(nn.Module):
    """A module that hands everything on to the decay inside, whose rates have other names here."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, model):
        return self.inner(model)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def orders(function, inputs, count=3):
    """The value and derivatives of up to this order, of sums with weights of which none is alike."""
    live = [x for x in inputs if x.requires_grad]
    found = [[function(*inputs)]]
    for _ in range(count):
        value = sum(
            (t.sin() * torch.linspace(0.5, 1, t.numel()).to(t).view(t.shape)).sum() for t in found[-1]
        )
        found.append(list(torch.autograd.grad(value, live, create_graph=True)))
    return found
