"""Hypergradients of other libraries, by one interface; `peers.py` times them, and `joint.py` tunes with them.

A task has the losses as functions of lists of tensors, ``train(weights, rates)`` and ``val(weights)``, and the lists
``weights`` and ``rates`` of leaves. Each function returns the hypergradient as a list of tensors like ``rates``.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


class Task(Protocol):
    """The losses of one batch each, as functions of all that they depend on."""

    @property
    def weights(self) -> list[Any]: ...
    @property
    def rates(self) -> list[Any]: ...
    def train(self, weights: Tensors, rates: Tensors) -> Tensor: ...
    def val(self, weights: Tensors) -> Tensor: ...


def betty(task: Task, method: str, steps: int, scale: float) -> Tensors:
    """betty-ml's ``method``, "neumann" or "cg", with the two problems that it expects as far as it looks at them."""
    from betty import hypergradient

    config = SimpleNamespace(
        neumann_iterations=steps, neumann_alpha=scale, cg_iterations=steps, cg_alpha=scale
    )
    below = SimpleNamespace(
        paths=[],
        cur_batch=None,
        config=config,
        training_step_exec=lambda batch: task.train(task.weights, task.rates),
        trainable_parameters=lambda: task.weights,
        parameters=lambda: task.weights,
    )
    above = SimpleNamespace(trainable_parameters=lambda: task.rates)
    vector = torch.autograd.grad(task.val(task.weights), task.weights)
    found: Tensors = getattr(hypergradient, method)(vector, below, above)
    return found


def torchopt(task: Task, steps: int, scale: float) -> Tensors:
    """Torchopt's implicit differentiation with its Neumann series."""
    from torchopt.diff.implicit import custom_root
    from torchopt.linear_solve import solve_inv

    def optimality(weights: Any, rates: Any) -> Any:
        return torch.func.grad(task.train)(weights, rates)

    solve = solve_inv(ns=True, maxiter=steps, alpha=scale)
    solved = custom_root(optimality, argnums=1, solve=solve)(lambda weights, rates: weights)
    rates = tuple(r.detach().requires_grad_() for r in task.rates)
    found = solved(tuple(w.detach().clone().requires_grad_() for w in task.weights), rates)
    answer: Tensors = torch.autograd.grad(task.val(found), rates)
    return answer


def hypergrad(task: Task, steps: int, scale: float) -> Tensors:
    """Hypergrad's Neumann series."""
    from hypergrad.approx_hypergrad import neumann

    weights = tuple(w.detach() for w in task.weights)
    rates = tuple(r.detach() for r in task.rates)
    found: Tensors = neumann(task.train, lambda w, r: task.val(w), weights, rates, num_iters=steps, lr=scale)
    return found


def double_backward(task: Task, steps: int, scale: float) -> Tensors:
    """A Neumann series by torch alone, whose products go back through one graph of the training gradient."""
    gradient = torch.autograd.grad(task.train(task.weights, task.rates), task.weights, create_graph=True)

    def product(v: Tensors) -> Tensors:
        return torch.autograd.grad(gradient, task.weights, v, retain_graph=True)

    total = _series(task, product, steps, scale)
    return torch.autograd.grad(gradient, task.rates, [-t for t in total])


def jvp_of_gradient(task: Task, steps: int, scale: float) -> Tensors:
    """A Neumann series by torch.func: a product is the derivative of the gradient in forward mode."""
    weights, rates = ([x.detach() for x in xs] for xs in (task.weights, task.rates))
    gradient = torch.func.grad(task.train)

    def product(v: Tensors) -> Tensors:
        found: Tensors = torch.func.jvp(lambda w: gradient(w, rates), (weights,), (list(v),))[1]
        return found

    total = _series(task, product, steps, scale)

    def along(rates: Tensors) -> Tensor:
        return -torch.stack(
            [(g * t).sum() for g, t in zip(gradient(weights, rates), total, strict=True)]
        ).sum()

    found: Tensors = torch.func.grad(along)(rates)
    return found


def _series(task: Task, product: Callable[[Tensors], Tensors], steps: int, scale: float) -> Tensors:
    """The sum of the terms (I − scale · A)ʲ ∂L_V/∂w, times the scale."""
    term = [t.clone() for t in torch.autograd.grad(task.val(task.weights), task.weights)]
    total = [t.clone() for t in term]
    for _ in range(steps):
        for t, s, p in zip(term, total, product(term), strict=True):
            s += t.sub_(p, alpha=scale)
    return [scale * s for s in total]
