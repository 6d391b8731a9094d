"""Functions written in Python, one at a time: compare second derivatives of a call with differences of its backward."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._tree import Tree
from .probe import COARSE, FINE_VALUES, Differences, Line
from .twin import Trial

_CALLS = 2


def is_lossy(trial: Trial, function: Any) -> bool:
    """Whether the derivative of a function's backward is wrong; False if the function cannot run by itself."""
    try:
        with _recorded(function) as calls, trial.problem.undisturbed(trial.seed) as passes:
            passes.train_loss(trial.train)
        return any(_loses(function, arguments, trial.exact) for arguments in calls[:_CALLS])
    except Exception:  # a function with state, or one that cannot run outside its place
        return False


@contextmanager
def _recorded(function: Any) -> Iterator[list[list[Any]]]:
    """The arguments of the calls of a function in this thread."""
    calls: list[list[Any]] = []
    forward, own, thread = function.forward, vars(function).get("forward"), threading.get_ident()
    takes_context = function.setup_context is torch.autograd.Function.setup_context

    def recording(*arguments: Any) -> Any:
        if threading.get_ident() == thread:
            calls.append(list(arguments[1:] if takes_context else arguments))
        return forward(*arguments)

    function.forward = staticmethod(recording)
    try:
        yield calls
    finally:
        if own is None:
            del function.forward
        else:
            function.forward = own


def _loses(function: Any, arguments: list[Any], exact: bool) -> bool:
    """Whether ∂(wᵀ ∂(sᵀ f(x))/∂x)/∂(x, s) disagrees with differences, along a direction in x and s."""
    inputs: list[Tensor] = []
    for i, x in enumerate(arguments):
        if isinstance(x, Tensor) and x.is_floating_point():
            # Parameters are not copied, since the function may also read them in another way.
            arguments[i] = x if x.is_leaf and x.requires_grad else x.detach().clone().requires_grad_()
            inputs.append(arguments[i])
    generator = torch.Generator().manual_seed(0)

    def like(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator, device="cpu").to(x.device, x.dtype)

    def run() -> Sequence[Tensor]:
        outputs = function.apply(*arguments)
        return [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x.requires_grad]

    slopes = [like(x).requires_grad_() for x in run()]
    across = [like(x) for x in inputs]
    tensors = {str(i): x for i, x in enumerate([*inputs, *slopes])}
    along = {n: like(x) for n, x in tensors.items()}
    size = {n: float(x.detach().norm()) / max(1, x.numel()) ** 0.5 or 1.0 for n, x in tensors.items()}
    along = {n: size[n] * x for n, x in along.items()}

    def pulled(create_graph: bool) -> Tensor:
        found = torch.autograd.grad(run(), inputs, slopes, create_graph=create_graph, allow_unused=True)
        return torch.stack([(g * w).sum() for g, w in zip(found, across, strict=True) if g is not None]).sum()

    value = pulled(True)
    found: Sequence[Tensor | None] = [None] * len(tensors)
    if value.requires_grad:
        found = torch.autograd.grad(value, list(tensors.values()), allow_unused=True)
    claimed = sum(float((g * along[n]).sum()) for n, g in zip(tensors, found, strict=True) if g is not None)
    return _differs(lambda: pulled(False), tensors, along, claimed, exact)


def _differs(value: Any, tensors: dict[str, Tensor], along: Tree, claimed: float, exact: bool) -> bool:
    dtype = torch.float64 if exact else torch.float32

    def values() -> Tree:
        return {"slope": torch.tensor([float(value().detach())], dtype=dtype)}

    with Line(tensors, along) as line:
        said = {"slope": torch.tensor([claimed], dtype=dtype)}
        steps = FINE_VALUES if exact else COARSE
        return Differences(values, line).judge(said, [["slope"]], steps).kind == "wrong"
