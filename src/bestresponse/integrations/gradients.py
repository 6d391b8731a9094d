"""Backward passes of the training loss that leave the ``.grad`` of hyperparameters empty."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..problem import Problem


class KeepEmpty:
    """While it is on, backward passes do not fill the ``.grad`` of a problem's hyperparameters.

    They would add ∂L_T/∂λ, which is not the hypergradient, and which gradient clipping would count.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._handles: list[Any] = []
        self._reached = False

    def begin(self) -> None:
        """Turn it on."""
        self.end()
        here = weakref.ref(self)  # a hook with a reference to it would keep the problem alive

        def clear(parameter: Tensor) -> None:
            parameter.grad = None
            if (owner := here()) is not None:
                owner._reached = True

        parameters: Iterable[Any] = self._problem.hyperparameters.values()
        self._handles = [p.register_post_accumulate_grad_hook(clear) for p in parameters]

    def end(self) -> None:
        """Turn it off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def require_reached(self) -> None:
        """Warn once if no backward pass has reached a hyperparameter."""
        if self._handles and not self._reached:
            self._problem.warn_once(
                "loop without hyperparameters",
                "the training loop must train on problem.train_loss; none of its backward passes reached a "
                "hyperparameter, so the weights may be trained on another loss. Return "
                "problem.train_loss(model, hyper, batch) from the training step, and call backward without inputs=.",
            )
