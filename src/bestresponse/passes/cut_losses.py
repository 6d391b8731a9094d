"""The loss functions of torch that a training loss calls, with their arguments cut off from the model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .tensors import plain

# Loss functions, and the numbers and names of the arguments in which each is jointly convex.
_FIRST = ("input",)
_CONVEX: dict[Any, tuple[str, ...]] = {
    F.cross_entropy: _FIRST,
    F.binary_cross_entropy_with_logits: _FIRST,
    F.binary_cross_entropy: _FIRST,
    F.poisson_nll_loss: _FIRST,
    F.gaussian_nll_loss: _FIRST,
    F.soft_margin_loss: _FIRST,
    F.mse_loss: ("input", "target"),
    F.smooth_l1_loss: ("input", "target"),
    F.huber_loss: ("input", "target"),
}
# Linear in logarithms of probabilities, which are convex in the argument of log_softmax.
_OF_LOGARITHMS = (F.nll_loss, F.kl_div)
_LOG_SOFTMAX = (F.log_softmax, torch.log_softmax, Tensor.log_softmax)


@dataclass
class Cuts:
    """The arguments of the loss functions, in the order of the calls.

    Attributes:
        outputs: the arguments, with the graph that made them.
        leaves: the copies, without a graph, that the loss functions were called with.
        names: the names of the loss functions.
    """

    outputs: list[Tensor] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def leaf(self, x: Tensor, function: Any) -> Tensor:
        """A copy of an argument without its graph."""
        self.outputs.append(x)
        self.leaves.append(x.detach().requires_grad_())
        self.names.append(function.__name__)
        return self.leaves[-1]


@contextmanager
def cut_losses() -> Iterator[Cuts]:
    """Run loss functions of torch on copies of their arguments, in this thread.

    Other paths from the model to the loss stay: a training loss is then a function of the copies and, past
    them, of weights and hyperparameters.
    """
    mode = _Cutting()
    with mode:
        yield mode.cuts


class _Cutting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.cuts = Cuts()
        self._logarithms: list[tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if function in _LOG_SOFTMAX:
            return self._log_softmax(function, args, named)
        if function in _OF_LOGARITHMS:
            return self._of_logarithms(function, list(args), named)
        arguments = list(args)
        for number, name in enumerate(_CONVEX.get(function, ())):
            place: Any = arguments if number < len(arguments) else named
            key: Any = number if number < len(arguments) else name
            x = place[key] if key in named or place is arguments else None
            if _can_cut(x):
                place[key] = self.cuts.leaf(x, function)
        return function(*arguments, **named)

    def _log_softmax(self, function: Any, args: Any, named: dict[str, Any]) -> Any:
        result = function(*args, **named)
        if args and _can_cut(args[0]):
            again = lambda x: function(x, *args[1:], **named)  # noqa: E731
            self._logarithms.append((result, args[0], again))
        return result

    def _of_logarithms(self, function: Any, arguments: list[Any], named: dict[str, Any]) -> Any:
        place: Any = arguments if arguments else named
        key: Any = 0 if arguments else "input"
        for result, x, again in self._logarithms:
            if place[key] is result:
                place[key] = again(self.cuts.leaf(x, function))
                break
        return function(*arguments, **named)


def _can_cut(x: Any) -> TypeGuard[Tensor]:
    """Whether a tensor with a graph is a plain one, outside of transforms."""
    return isinstance(x, Tensor) and torch.is_grad_enabled() and x.requires_grad and plain([x])
