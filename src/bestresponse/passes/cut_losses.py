"""The loss functions of torch that a training loss calls, with their arguments cut off from the model."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch
from torch.overrides import TorchFunctionMode

from ..errors import EvaluationError
from . import checkpoint, graph
from .tensors import computes_as_tensor

# Loss functions, and the names of the first arguments, in which each is jointly convex.
_FIRST, _BOTH = ("input",), ("input", "target")
_OF_LOGARITHMS = (F.nll_loss, F.kl_div)
_CONVEX: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(_OF_LOGARITHMS, _FIRST),
    F.cross_entropy: _FIRST,
    F.binary_cross_entropy_with_logits: _FIRST,
    F.binary_cross_entropy: _FIRST,
    F.poisson_nll_loss: _FIRST,
    F.gaussian_nll_loss: _FIRST,
    F.soft_margin_loss: _FIRST,
    F.multilabel_soft_margin_loss: _FIRST,
    F.mse_loss: _BOTH,
    F.smooth_l1_loss: _BOTH,
    F.huber_loss: _BOTH,
}
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class Cut(NamedTuple):
    """An argument of a loss function.

    Attributes:
        output: the argument, with the graph that made it.
        leaf: the copy, without a graph, that the loss function was called with.
        function: the name of the loss function.
        classes: the dimension of the classes if the argument is logarithms of probabilities; else None.
        number: its number among all arguments that could be cut.
    """

    output: Tensor
    leaf: Tensor
    function: str
    classes: int | None
    number: int


@dataclass
class Cuts:
    """The arguments of the loss functions.

    Attributes:
        made: the arguments that were cut, in the order of the calls.
        inner: the numbers of arguments that must stay whole, since a later argument depends on them.
        missed: the names of loss functions whose arguments cannot be cut.
        whole: the numbers of the arguments that were not cut.
        alone: whether checkpointed blocks ran in the form of this library.
        in_block: whether a checkpointed block, in the form of this library, called a loss function.
        differentiated: whether the training loss took a gradient of a loss function.
    """

    made: list[Cut] = field(default_factory=list)
    inner: set[int] = field(default_factory=set)
    missed: list[str] = field(default_factory=list)
    whole: Collection[int] = ()
    alone: bool = True
    in_block: bool = False
    differentiated: bool = False
    # Nodes that lead to no copy; a long chain of losses is walked once.
    _clear: set[Any] = field(default_factory=set)

    def below(self, x: Tensor) -> set[int]:
        """The numbers of the arguments that were cut before, and on whose copies a tensor depends."""
        if graph.made_by(x) is None or not self.made:
            return {cut.number for cut in self.made if cut.leaf is x}
        walked = list(graph.nodes([x], seen=self._clear))
        ids = {id(node.variable) for node in walked if hasattr(node, "variable")}
        found = {cut.number for cut in self.made if id(cut.leaf) in ids} if ids else set()
        if found:
            self._clear.difference_update(walked)
        return found


@contextmanager
def cut_losses(whole: Collection[int], values: Mapping[int, Tensor] | None = None) -> Iterator[Cuts]:
    """Run loss functions of torch on copies of their arguments, except on those with a number in ``whole``.

    Other paths from the model to the loss stay: a training loss is then a function of the copies and, past
    them, of weights and hyperparameters. ``values`` replace those of copies, by their place in `Cuts.made`.

    Raises:
        EvaluationError: the training loss takes a gradient of a loss function, which would end at the copies.
    """
    mode = _Cutting(whole, values or {})
    with mode:
        yield mode.cuts
    if mode.cuts.differentiated:  # and the training loss caught the error
        raise _differentiated()


class _Cutting(TorchFunctionMode):
    def __init__(self, whole: Collection[int], values: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.cuts, self._values, self._count = Cuts(whole=whole), values, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, arguments = dict(kwargs or {}), list(args)
        if function in _GRADIENTS:
            self._check_gradient(next(iter(args or named.values())))
        for number, name in enumerate(_CONVEX.get(function, ())):
            place: Any = arguments if number < len(arguments) else named
            key: Any = number if number < len(arguments) else name
            if place is arguments or key in named:
                place[key] = self._cut(place[key], function)
        return function(*arguments, **named)

    def _check_gradient(self, outputs: Any) -> None:
        of = [outputs] if isinstance(outputs, Tensor) else outputs
        if any(isinstance(x, Tensor) and self.cuts.below(x) for x in of):
            self.cuts.differentiated = True
            raise _differentiated()

    def _cut(self, x: Any, function: Any) -> Any:
        """The argument that the loss function gets."""
        if not _moves(x):
            return x
        of_logarithms = function in _OF_LOGARITHMS
        dim = _dim_of_classes(x, function) if of_logarithms and _is_plain(x) else None
        if not _is_plain(x) or (of_logarithms and dim is None):
            self.cuts.missed.append(function.__name__)
            return x
        number, self._count = self._count, self._count + 1
        if number in self.cuts.whole:
            return x
        self.cuts.inner |= self.cuts.below(x)
        self.cuts.in_block |= checkpoint.inside_block()
        value = self._values.get(len(self.cuts.made), x)
        cut = Cut(x, value.detach().requires_grad_(), function.__name__, dim, number)
        self.cuts.made.append(cut)
        return cut.leaf


def _differentiated() -> EvaluationError:
    return EvaluationError(
        "GaussNewton() cannot follow a train_loss that takes a gradient of a loss function of torch (adversarial "
        "examples, penalties of gradients, inner steps). Give GaussNewton(predict, loss, rest), or use Hessian()."
    )


def _moves(x: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor with a graph, also inside a transform of torch.func."""
    if not isinstance(x, Tensor) or not torch.is_grad_enabled():
        return False
    while not x.requires_grad and _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return bool(x.requires_grad)


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor computes as torch's own, and no transform is active."""
    return (
        computes_as_tensor(type(x))
        and not torch._C._are_functorch_transforms_active()
        and forward_ad.unpack_dual(x).tangent is None  # type: ignore[no-untyped-call]
    )


def _dim_of_classes(x: Tensor, function: Any) -> int | None:
    """The dimension along which x has logarithms of probabilities; None if it has none, or may have several."""
    if x.numel() == 0 or x.ndim == 0:
        return None
    node = graph.made_by(x)
    if function is F.kl_div and node is not None and node.name().startswith("LogSoftmaxBackward"):
        saved = int(node._saved_dim)  # dimensions from the end appear as unsigned numbers
        return (saved - 2**64 if saved >= 2**63 else saved) % x.ndim
    eps = torch.finfo(x.dtype).eps
    near = 1e-9 if eps < 1e-12 else 1e-4 if eps < 1e-6 else 5e-2
    dims = [min(1, x.ndim - 1)] if function is F.nll_loss else range(x.ndim)
    found = [d for d in dims if float(torch.logsumexp(x.detach(), d).abs().max()) <= near]
    return found[0] if len(found) == 1 else None
