"""Parameters in a loss that belong neither to the model nor to hyper."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import named
from . import graph
from .two_losses import TwoLosses


def foreign_parameters(problem: TwoLosses, loss: Tensor) -> list[nn.Parameter]:
    """The trainable parameters in the graph of a loss that are neither weights nor hyperparameters."""
    own = {id(p) for p in (*problem.model.parameters(), *problem.hyper.parameters())}
    return [p for p in graph.variables(loss) if isinstance(p, nn.Parameter) and id(p) not in own]


def warn_of_foreign_parameters(problem: TwoLosses, name: str, foreign: Sequence[nn.Parameter]) -> None:
    """Warn of these parameters by name, once."""
    known = _names_in(getattr(problem, name))
    said = [f"{known.get(id(p), 'one without a name')} {list(p.shape)}" for p in foreign]
    problem.warn_once(
        ("foreign parameters", *map(id, foreign)),
        f"{name} uses trainable parameters that belong neither to model nor to hyper: {named(said)}. They count "
        "as constants: they get no hypergradient, and the weights' response is that at their present values. "
        "Register them in model to train them or in hyper to tune them, or freeze them with requires_grad_(False).",
    )


def _names_in(function: Callable[..., Any]) -> dict[int, str]:
    """Parameters by identity that a function reaches by its own names: captured, global, or of its object."""
    function = inspect.unwrap(function)
    try:
        found = inspect.getclosurevars(function)
        values = {**found.globals, **found.nonlocals}
    except TypeError:  # not a Python function
        values = {}
    values |= getattr(getattr(function, "__self__", function), "__dict__", {})
    names = {}
    for name, value in values.items():
        if isinstance(value, nn.Module):
            names.update({id(p): f"{name}.{path}" for path, p in value.named_parameters()})
        elif isinstance(value, nn.Parameter):
            names[id(value)] = name
    return names
