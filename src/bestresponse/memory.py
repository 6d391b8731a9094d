"""The state that methods keep on a problem from one call to the next."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from . import _tree
from ._tree import Tree


@dataclass
class MethodState:
    """The state that a method keeps between two calls on one problem.

    Attributes:
        solution: the last solution of the linear system by weight, or for `Penalty` the difference of its two sets of
            weights; None before the first call.
        memory: further values (a scale estimate, a chosen damping, moments).
    """

    solution: Tree | None = None
    memory: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> "MethodState":
        """The same tensors and values in dicts that can change without those of this state."""
        return MethodState(self.solution, _own_dicts(self.memory))

    def fits(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether the solution still has the layout of the weights."""
        if self.solution is None:
            return True
        of_solution = {n: w for n, w in weights.items() if n in self.solution}
        return _tree.same_layout(self.solution, of_solution)


def _own_dicts(value: Any) -> Any:
    return {k: _own_dicts(x) for k, x in value.items()} if isinstance(value, dict) else value


@runtime_checkable
class Remembering(Protocol):
    """A method with parts that have their own state."""

    def parts_that_remember(self) -> Mapping[str, object]:
        """The parts of the method that have their own state on a problem, by name."""


def settings_of(value: Any) -> str:
    """A method's settings as text, equal for two objects with the same settings."""
    if is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{f.name}={settings_of(getattr(value, f.name))}" for f in fields(value) if f.init)
        return f"{type(value).__name__}({inside})"
    if isinstance(value, functools.partial):
        arguments = [value.func, *value.args, *sorted(value.keywords.items())]
        return f"partial({', '.join(map(settings_of, arguments))})"
    if repr(value) == object.__repr__(value):  # which would contain an address
        return type(value).__qualname__
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else repr(value)
