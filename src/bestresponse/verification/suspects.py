"""The possible causes of a wrong derivative, by name: functions, nodes without a graph, constant tensors."""

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from ..passes import graph
from .lone_functions import is_lossy
from .twin import Trial

_OURS = str(Path(__file__).parents[1])
_PACKAGE = __package__.partition(".")[0]
_TORCH = str(Path(torch.__file__).parent)


def functions(trial: Trial) -> list[str]:
    """The functions written in Python in the graph of the training loss, with file and line."""
    return [_described(f) for f in _classes(trial)]


def lossy_functions(trial: Trial) -> list[str]:
    """The functions whose backward has a wrong derivative, by differences of each backward alone."""
    return [_described(f) for f in _classes(trial) if is_lossy(trial, f)]


def _classes(trial: Trial) -> list[type]:
    with trial.problem.undisturbed(trial.seed) as passes:
        nodes = list(graph.nodes([passes.train_loss(trial.train)]))
    found = dict.fromkeys(_function_of(node) for node in nodes)
    return [f for f in found if f is not None and not f.__module__.startswith(f"{_PACKAGE}.")]


def _function_of(node: Any) -> type | None:
    function: type | None = node._forward_cls if isinstance(node, BackwardCFunction) else None  # type: ignore[attr-defined]
    return function


def _described(function: type) -> str:
    try:
        line = inspect.getsourcelines(function)[1]
        return f"{function.__qualname__} ({Path(inspect.getfile(function)).name}, line {line})"
    except (OSError, TypeError):
        return f"{function.__module__}.{function.__qualname__}"


def without_graph(trial: Trial) -> list[str]:
    """The operations whose backward returns a tensor without a graph although its input has one."""
    found: dict[str, None] = {}

    def watch(node: Any) -> Any:
        def hook(returned: Any, given: Any) -> None:
            if not any(isinstance(g, Tensor) and g.requires_grad for g in given):
                return
            for g in returned:
                if isinstance(g, Tensor) and not g.requires_grad and bool(g.to_dense().ne(0).any()):
                    function = _function_of(node)
                    found[node.name() if function is None else _described(function)] = None

        return node.register_hook(hook)

    problem = trial.problem
    try:
        with problem.undisturbed(trial.seed) as passes:
            loss = passes.train_loss(trial.train)
            for node in graph.nodes([loss]):
                if not hasattr(node, "variable"):
                    watch(node)
            inputs = [*problem.weights.values(), *problem.hyperparameters.values()]
            torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
    except Exception:  # a graph that does not support hooks
        return []
    return list(found)


def doubled_backwards(trial: Trial) -> list[str]:
    """The backward passes inside a loss, such as a gradient penalty: these need third derivatives."""
    with trial.problem.undisturbed(trial.seed) as passes:
        nodes = list(graph.nodes([passes.train_loss(trial.train)]))
    return sorted({node.name() for node in nodes if "BackwardBackward" in node.name()})


def constants(trial: Trial) -> list[str]:
    """The places where the loss detaches a tensor from its graph, or hooks into its gradient, with file and line."""
    try:
        with trial.problem.undisturbed(trial.seed) as passes, _Watch() as watch:
            passes.train_loss(trial.train)
    except Exception:  # a loss that does not support the mode
        return []
    return list(watch.places)


class _Watch(TorchFunctionMode):
    """Records the calls that detach a tensor from its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, None] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _WATCHED.get(function)
        watched = name is not None and isinstance(args[0], Tensor) and args[0].requires_grad
        if watched and (where := _caller()):
            self.places[f"{name}{where}"] = None
        return function(*args, **(kwargs or {}))


_WATCHED: dict[Any, str] = {
    torch.Tensor.detach: "detach()",
    torch.Tensor.detach_: "detach_()",
    torch.detach: "detach()",
    torch.Tensor.data.__get__: ".data",  # type: ignore[attr-defined]
    torch.Tensor.register_hook: "register_hook()",
    torch.Tensor.item: "item()",
    torch.Tensor.tolist: "tolist()",
}


def _caller() -> str:
    """The line of the user's code that calls torch; empty if the library calls it."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OURS):
        return ""
    return f" in {Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
