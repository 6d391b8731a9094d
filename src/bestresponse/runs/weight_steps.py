"""Steps of the weights on the training loss."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import _tree
from ..batches import weighted
from ..hyperparameters import orthant_wise
from ..passes.checked_loss import checked_loss
from ..passes.embedding import clip_gradients
from ..passes.foreign_errors import foreign_errors_told
from ..problem import Problem
from .events import add_event
from .requirements import penalties_at_zero

WeightStep = Callable[[Problem, Any], None]


class WeightSteps:
    """Steps of the weights by an optimiser, which do not change ``.grad`` of the hyperparameters.

    Args:
        problem: the two losses.
        optimizer: a torch optimiser, whose settings are recorded; or a function (problem, batch) -> None that updates
            the weights itself.
    """

    def __init__(self, problem: Problem, optimizer: Optimizer | WeightStep) -> None:
        self.problem, self._first = problem, FirstSettings(optimizer)
        self._skipped = 0
        self._penalties = [(single.model, penalties_at_zero(single)) for single in problem.singles]

    def step(
        self, optimizer: Optimizer | WeightStep, batch: Any, clip: float | None, skips: bool = False
    ) -> Tensor:
        """Make a step, and return the training loss before it, or after it if a function makes the step.

        If the policy ``skips``, a step of an optimiser with a loss or a gradient that is not finite is left out,
        and the loss is NaN.
        """
        problem = self.problem
        if not isinstance(optimizer, Optimizer):
            optimizer(problem, batch)
            with problem.undisturbed(twice=False) as passes:
                (loss,) = problem.group.mean(
                    lambda: [passes.train_loss(batch).detach()], [_tree.number(problem.weights)], batch
                )
                assert loss is not None
                return loss
        weights = list(problem.weights.values())
        optimizer.zero_grad(set_to_none=True)
        buffers = [(b, b.clone()) for b in self._buffers()] if skips else []
        with foreign_errors_told("Use smaller batches, or Batches of smaller pieces."):
            loss = self._differentiate(weights, batch)
        if skips and _tree.not_finite({"loss": loss, **_gradients(problem.weights)}):
            self._skipped += 1
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)  # a batch that is not finite spoils running statistics
            optimizer.zero_grad(set_to_none=True)
            return torch.full_like(loss, torch.nan)
        with self.in_orthants():
            if clip is not None:
                for single in problem.singles:  # each fold as it would be alone
                    clip_gradients(list(single.weights.values()), clip)
            optimizer.step()
        # A gradient kept until the next step would take memory during the hypergradient.
        optimizer.zero_grad(set_to_none=True)
        return loss

    def _differentiate(self, weights: list[nn.Parameter], batch: Any) -> Tensor:
        """Put the training gradient into ``.grad`` of the weights, and return the loss; both are means over ranks."""
        problem = self.problem
        statistics = _running_statistics(problem)

        def own() -> list[Tensor | None]:
            losses = []
            modules = (*problem.model.modules(), *problem.hyper.modules())
            with problem.group.differentiating(modules):
                for piece, weight in weighted(batch):
                    with problem.group.reading(modules):
                        loss = problem.train_loss(problem.model, problem.hyper, piece)
                    loss = weight * problem.group.joined(checked_loss("train_loss", loss))
                    # With inputs, ∂L_T/∂λ is not computed, and .grad of the hyperparameters stays free of it.
                    torch.autograd.backward(loss, inputs=weights)
                    losses.append(loss.detach())
            return [torch.stack(losses).sum(), *(w.grad for w in weights), *statistics]

        like = [_tree.number(problem.weights), *weights, *statistics]
        loss, *means = problem.group.mean(own, like, batch)
        assert loss is not None
        if problem.group.averages:
            for w, grad in zip(weights, means, strict=False):
                w.grad = grad
            for buffer, mean in zip(statistics, means[len(weights) :], strict=True):
                buffer.copy_(buffer if mean is None else mean)
        return loss

    @property
    def holds_weights_at_zero(self) -> bool:
        """Whether a penalty has a kink at zero."""
        return any(penalties for _, penalties in self._penalties)

    @contextmanager
    def in_orthants(self) -> Iterator[None]:
        """A context for an optimiser's step, and for clipping before it, in which ℓ1 penalties hold weights at zero."""
        with ExitStack() as stack:
            for model, penalties in self._penalties:
                stack.enter_context(orthant_wise(model, *penalties))
            yield

    def tell(self, row: dict[str, Any]) -> None:
        """Add the steps that were left out since the last call to a row of the history."""
        if self._skipped:
            add_event(row, "weight steps skipped", f"{self._skipped} since a loss or gradient was not finite")
        self._skipped = 0

    def _buffers(self) -> list[Tensor]:
        return [*self.problem.model.buffers(), *self.problem.hyper.buffers()]

    @contextmanager
    def afresh(self, optimizer: Optimizer | WeightStep) -> Iterator[Optimizer | WeightStep]:
        """The optimiser with its original settings and empty state; both are restored at the end.

        For a problem over folds it is a copy that holds the weights of the problem's `whole`.
        """
        if not isinstance(optimizer, Optimizer):
            yield optimizer
            return
        kept = optimizer.state, [dict(group) for group in optimizer.param_groups]
        try:
            optimizer.state = defaultdict(dict)
            _set_groups(optimizer, self._first.of(optimizer))
            yield optimizer if self.problem.whole is self.problem else _of_whole(self.problem, optimizer)
        finally:
            optimizer.state = kept[0]
            _set_groups(optimizer, kept[1])


def _running_statistics(problem: Problem) -> list[Tensor]:
    """The running statistics of norms, whose means over the ranks all ranks go on with; none for one process."""
    if not problem.group.averages:
        return []
    names = ("running_mean", "running_var")
    found = [m._buffers.get(name) for m in problem.model.modules() for name in names]
    return [x for x in found if x is not None]


class FirstSettings:
    """The parameter groups of an optimiser before a scheduler changed a rate (some do so when they are created)."""

    def __init__(self, optimizer: object) -> None:
        self._optimizer, self._groups = optimizer, _first_groups(optimizer)

    def of(self, optimizer: object) -> list[dict[str, Any]]:
        """The groups of this optimiser; those that it has now if it was assigned later."""
        return self._groups if optimizer is self._optimizer else _first_groups(optimizer)


def _gradients(weights: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    return {name: w.grad for name, w in weights.items()}


def _first_groups(optimizer: object) -> list[dict[str, Any]]:
    if not isinstance(optimizer, Optimizer):
        return []
    groups = optimizer.param_groups
    return [{**g, "lr": g.get("initial_lr", g["lr"])} if "lr" in g else dict(g) for g in groups]


def _of_whole(problem: Problem, optimizer: Optimizer) -> Optimizer:
    """A copy of an optimiser of the folds' weights that holds the same weights of the whole model instead."""
    names = {id(w): name for single in problem.singles for name, w in single.weights.items()}
    other = copy.copy(optimizer)
    other.state, other.param_groups = defaultdict(dict), []
    left = dict(problem.whole.weights)
    for group in optimizer.param_groups:
        held = dict.fromkeys(names[id(p)] for p in group["params"])
        other.param_groups.append({**group, "params": [left.pop(n) for n in held if n in left]})
    return other


def _set_groups(optimizer: Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Restore the settings of all groups."""
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
