"""A copy of model and hyper, in which other tensors replace weights and hyperparameters."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._tree import Tree
from ..errors import ArgumentError, EvaluationError
from ..passes import graph
from ..passes.substitution import no_checkpoints, places, refuse_max_norm
from ..problem import Problem


class Template(nn.Module):
    """A copy of a problem's two modules without weights and hyperparameters; each call passes these.

    Args:
        problem: the problem whose modules are copied, with their buffers, modes and frozen parameters.

    Attributes:
        model, hyper: the copies, with empty parameters as placeholders.

    Raises:
        ArgumentError: the modules can't be copied, or have an embedding with ``max_norm``.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        refuse_max_norm(problem.model, "a hypernetwork")
        originals = {f"model.{n}": p for n, p in problem.weights.items()}
        originals |= {f"hyper.{n}": p for n, p in problem.hyperparameters.items()}
        # Empty placeholders keep shared parameters shared, and cost no memory.
        self._replaced = {
            name: (p, nn.Parameter(p.detach().new_empty(0), requires_grad=False))
            for name, p in originals.items()
        }
        memo: dict[int, Any] = {id(p): stand_in for p, stand_in in self._replaced.values()}
        try:
            self.model, self.hyper = copy.deepcopy((problem.model, problem.hyper), memo)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                f"a hypernetwork needs a model and a hyper that copy.deepcopy can copy; got: {error} Register "
                "tensors as parameters or buffers, and leave out what can't be copied."
            ) from error
        self._places = places(self, {name: stand_in for name, (_, stand_in) in self._replaced.items()})
        lost = self._replaced.keys() - set(self._places.values())
        if lost:
            raise ArgumentError(
                f"a hypernetwork needs modules whose copies share the same parameters; those of {sorted(lost)[:5]} do "
                "not. Let __deepcopy__ of the modules use its memo."
            )

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.model, self.hyper, *arguments)

    def run(self, function: Callable[..., Any], weights: Tree, values: Tree, *arguments: Any) -> Any:
        """``function(model, hyper, *arguments)`` with these weights and hyperparameters."""
        named = {f"model.{name}": x for name, x in weights.items()}
        named |= {f"hyper.{name}": x for name, x in values.items()}
        placed = {place: named[name] for place, name in self._places.items()}
        with no_checkpoints():
            return torch.func.functional_call(self, placed, (function, *arguments), tie_weights=False)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Make placeholders visible in the graph of a loss."""
        try:
            for _, stand_in in self._replaced.values():
                stand_in.requires_grad_(True)
            yield
        finally:
            for _, stand_in in self._replaced.values():
                stand_in.requires_grad_(False)

    def refuse_captured(self, name: str, loss: Tensor, substitutes: Iterable[Tensor]) -> None:
        """Raise if a loss that ran `watched` used an original, or a placeholder, besides the substitutes."""
        reached = graph.leaves(loss, until=substitutes)
        captured = [key for key, tensors in self._replaced.items() if reached & set(map(id, tensors))]
        if captured:
            raise EvaluationError(
                f"{name} must read weights and hyperparameters through its arguments, as registered parameters, "
                f"since a hypernetwork puts other tensors in their place; it used the original {captured[:5]}. "
                "Replace the captured module or parameter in the function by its argument, and a plain list of "
                "parameters by an nn.ParameterList."
            )
