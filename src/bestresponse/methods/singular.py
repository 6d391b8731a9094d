"""Find the operation of the training loss whose derivative is NaN or infinite."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._tree import Tree
from ..errors import EvaluationError
from ..passes import graph
from ..problem import Passes

_OURS = str(Path(__file__).parents[1])


def singular_operation(passes: Passes, batch: Any, v: Tree) -> str:
    """The operation, as text, where vᵀ ∂²L_T/∂w² or the gradient itself first becomes infinite or NaN; empty if none.

    It computes the training gradient once more and records where each operation was called.
    """
    weights = {n: passes.problem.weights[n] for n in v}
    inputs = [*passes.problem.weights.values(), *passes.problem.hyperparameters.values()]
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            loss = passes.train_loss(batch)
            gradient: Sequence[Tensor | None] = []

            def differentiate_once() -> None:
                nonlocal gradient
                gradient = torch.autograd.grad(
                    loss, list(weights.values()), create_graph=True, allow_unused=True
                )

            culprit, order = _first_culprit([loss], differentiate_once), "first"
        if culprit is None:
            pairs = [
                (g, v[n]) for n, g in zip(weights, gradient, strict=True) if g is not None and g.requires_grad
            ]
            outputs, cotangents = [g for g, _ in pairs], [x for _, x in pairs]
            culprit, order = (
                _first_culprit(
                    outputs,
                    lambda: torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True),
                ),
                "second",
            )
    except (EvaluationError, RuntimeError):  # the search only serves a message
        return ""
    return "" if culprit is None else f"the {order} derivative of {_called(culprit)} is NaN or infinite here"


def _first_culprit(outputs: Iterable[Tensor], differentiate: Callable[[], Any]) -> Any:
    """The first node that turns finite cotangents into infinite or NaN ones; None if there is none."""
    found: list[Any] = []

    def note(node: Any) -> Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], None]:
        def hook(after: Sequence[Tensor | None], before: Sequence[Tensor | None]) -> None:
            if not found and _finite(before) and not _finite(after):
                found.append(node)

        return hook

    handles = [node.register_hook(note(node)) for node in graph.nodes(outputs)]
    try:
        differentiate()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _finite(tensors: Sequence[Tensor | None]) -> bool:
    return all(x is None or bool(x.isfinite().all()) for x in tensors)


def _called(node: Any) -> str:
    """The operation of the loss that a node belongs to, and the line that called it."""
    while (parent := node.metadata.get("parent_")) is not None:
        node = parent
    lines = [
        line
        for line in node.metadata.get("traceback_", ())
        if not any(place in line.split(",")[0] for place in ("/torch/", _OURS))
    ]
    where = " ".join(lines[-1].split())[:200] if lines else ""
    return f"{node.name()} ({where})" if where else str(node.name())
