"""A walk through an autograd graph: which leaves it reaches, and which nodes lose a second derivative.

Autograd does not raise by itself when a first derivative cannot be differentiated again. It prunes the path through
such a node, and the product is zero or too small. So this module searches for nodes that are known to do so.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .. import _tree
from ..errors import SecondDerivativeError

# Every function wrapped by once_differentiable shares the code object of one inner function.
_ONCE = once_differentiable(lambda ctx: None).__code__

COMPILED = "a module or function under torch.compile"
KINKED = ("Relu", "Threshold", "Hardtanh", "Abs", "Clamp", "MaxPool", "MaxBackward", "LeakyRelu", "Prelu")

_WAYS_OUT = (
    (
        "scaled_dot_product",
        "run the loss under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), whose attention has "
        "second derivatives",
    ),
    (
        "selective checkpoint",
        "checkpoint without context_fn (use_reentrant=False), or use Implicit(curvature=FiniteDifference())",
    ),
    (
        "scale_grad_by_freq",
        "make the embedding with scale_grad_by_freq=False, and scale its learning rate instead",
    ),
    ("checkpoint", "pass use_reentrant=False to torch.utils.checkpoint.checkpoint"),
    (
        "torch.compile",
        "give Problem the original module or loss without torch.compile, and train with the compiled one; or use "
        "Implicit(curvature=FiniteDifference())",
    ),
    (
        "weight_norm",
        "register your own parametrization that computes g * v / v.norm() with plain operations, or use "
        "Implicit(curvature=FiniteDifference())",
    ),
    ("jvp function", "use Hessian(), whose products go in reverse mode, or FiniteDifference()"),
    ("forward AD", "use Hessian(), whose products go in reverse mode, or FiniteDifference()"),
    ("sparse", "call F.embedding with sparse=False; nn.Embedding and nn.EmbeddingBag need no change"),
    ("CuDNN", "run the loss under torch.backends.cudnn.flags(enabled=False)"),
    ("", "write the operation with twice differentiable ones, or use Implicit(curvature=FiniteDifference())"),
)


def nodes(
    tensors: Iterable[Tensor], until: Iterable[Tensor] = (), seen: set[Any] | None = None
) -> Iterator[Any]:
    """Each node of the graphs that made ``tensors``, once; not those that made ``until``.

    Nodes in ``seen`` are passed over, and those that are not are added.
    """
    seen = set() if seen is None else seen
    seen |= set(map(made_by, until))
    pending = []
    for x in tensors:
        node = made_by(x)
        if node is not None and node not in seen:
            seen.add(node)
            pending.append(node)
    yield from _walk(pending, seen)


def made_by(x: Tensor) -> Any:
    """The node that made a tensor, read so that no function mode sees it: it shows who puts a hook there."""
    with torch._C.DisableTorchFunction():
        return x.grad_fn


def below(node: Any) -> Iterator[Any]:
    """Each node that a node leads to, once, and the node itself."""
    yield from _walk([node], {node})


def _walk(pending: list[Any], seen: set[Any]) -> Iterator[Any]:
    while pending:
        node = pending.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


def leaves(loss: Tensor, until: Iterable[Tensor] = ()) -> set[int]:
    """The identities of the leaves (parameters) that a loss depends on."""
    return {id(x) for x in variables(loss, until)}


def leaves_among(of_loss: Iterable[Any], loss: Tensor) -> set[int]:
    """`leaves`, from the nodes of the graph."""
    found = {id(node.variable) for node in of_loss if hasattr(node, "variable")}
    return found | {id(loss)} if loss.is_leaf else found


def variables(loss: Tensor, until: Iterable[Tensor] = ()) -> list[Tensor]:
    """The leaves that a loss depends on."""
    found = [node.variable for node in nodes([loss], until) if hasattr(node, "variable")]
    return [*found, loss] if loss.is_leaf else found


def uses(tensors: Iterable[Tensor]) -> Counter[int]:
    """How often each leaf is an argument in the graphs that made ``tensors``, by its identity."""
    counts: Counter[int] = Counter()
    for node in nodes(tensors):
        counts.update(id(f.variable) for f, _ in node.next_functions if hasattr(f, "variable"))
    return counts


def has_kinks(loss: Tensor) -> bool:
    """Whether a loss has an operation whose derivative jumps."""
    return any(map(is_kinked, nodes([loss])))


def is_kinked(node: Any) -> bool:
    """Whether the derivative of an operation jumps; a checkpointed block says so itself."""
    return node.name().startswith(KINKED) or getattr(node, "kinked", False)


def refuse_reentrant(loss: Tensor) -> None:
    """Raise if autograd.grad cannot see a part of a loss at all, or gives something else than its gradient."""
    for node in nodes([loss]):
        _refuse_first(node)


def _refuse_first(node: Any) -> None:
    """Raise if the first derivative of a node is hidden, or is not that of its value."""
    if node.name() == "CheckpointFunctionBackward":
        raise second_derivative_error("re-entrant checkpoint", "its inside is hidden from autograd.grad")
    if node.name().startswith("Embedding") and getattr(node, "_saved_scale_grad_by_freq", False):
        raise second_derivative_error(
            "scale_grad_by_freq",
            "it divides the gradient of a row by its count in the batch, so it is no gradient",
        )


def inspect_loss(loss: Tensor, until: Iterable[Tensor] = ()) -> None:
    """Raise if the first derivative of a training loss cannot be differentiated."""
    inspect_nodes(nodes([loss], until))


def inspect_nodes(of_loss: Iterable[Any]) -> None:
    """`inspect_loss`, of the nodes of its graph."""
    for node in of_loss:
        _refuse_first(node)
        if node.name().startswith("WeightNormInterface"):
            raise second_derivative_error("weight_norm", "torch's second derivative of it is wrong")
        if node.name() == "EmbeddingBackward0" and node._saved_sparse:
            raise second_derivative_error("F.embedding", "its gradient is sparse, and loses derivatives")
        if node.name() == "CompiledFunctionBackward":
            raise second_derivative_error(COMPILED, "compiled code has only a first derivative")
        function: Any = getattr(node, "_forward_cls", None)
        backward = getattr(function, "backward", None)
        if getattr(backward, "__code__", None) is _ONCE:
            name = f"{function.__module__}.{function.__qualname__}"
            raise second_derivative_error(name, "its backward is marked @once_differentiable")


def inspect_gradient(gradient: Iterable[Tensor], until: Iterable[Tensor] = ()) -> None:
    """Raise if the graph of a gradient has a node through which it cannot be differentiated."""
    for node in nodes(gradient, until):
        if node.name() in ("torch::autograd::NotImplemented", "torch::autograd::Error"):
            raise second_derivative_error("an operation of the training loss", _message_of(node))


def _message_of(node: Any) -> str:
    """The message of a node that only raises, with the operation's name in it."""
    for arguments in range(1, 9):
        try:
            node(*[torch.zeros(())] * arguments)
        except TypeError:  # another number of arguments
            continue
        except RuntimeError as error:
            return str(error)
    return str(node.name())


def edges(outputs: Mapping[str, Tensor]) -> dict[str, GradientEdge]:
    """The nodes where the graphs of ``outputs`` begin; `vector_product` needs only these, so the values can be freed.

    Outputs without a graph are constant and left out.
    """
    return {name: get_gradient_edge(x) for name, x in outputs.items() if x.requires_grad}


def vector_product(
    outputs: Mapping[str, GradientEdge],
    inputs: Sequence[Tensor],
    v: Mapping[str, Tensor],
    retain_graph: bool,
) -> Sequence[Tensor | None]:
    """vᵀ ∂outputs/∂inputs, None for an input that is not reached.

    Torch's own errors for missing second derivatives, some of which appear only now, get a clear message.
    """
    if not outputs:
        return [None] * len(inputs)
    with missing_derivatives_told():
        return torch.autograd.grad(
            list(outputs.values()),
            inputs,
            [v[name] for name in outputs],
            retain_graph=retain_graph,
            allow_unused=True,
        )


@contextmanager
def missing_derivatives_told() -> Iterator[None]:
    """Replace torch's own errors for derivatives that do not exist by clear messages."""
    try:
        yield
    except RuntimeError as error:
        if not _is_missing_derivative(error):
            raise
        raise second_derivative_error("an operation of the training loss", str(error)) from error


class Pushforward:
    """ẋ ↦ (∂outputs/∂inputs) ẋ, by differentiating the map u ↦ uᵀ ∂outputs/∂inputs, which is linear in u.

    So it needs the same derivatives as reverse mode, and agrees with it to rounding.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        self._live = [x.requires_grad for x in outputs]
        reached = [x for x in outputs if x.requires_grad]
        self._dual = [torch.zeros_like(x, requires_grad=True) for x in reached]
        self._pulled: Sequence[Tensor | None] = [None] * len(inputs)
        if reached:
            with missing_derivatives_told():
                self._pulled = torch.autograd.grad(
                    reached, inputs, self._dual, create_graph=True, allow_unused=True
                )
            try:  # a missing derivative would be pruned, as second derivatives are
                inspect_gradient([p for p in self._pulled if p is not None], until=inputs)
            except SecondDerivativeError as error:
                raise SecondDerivativeError(
                    "forward mode differentiates once more than Unrolled, and requires a third derivative of every "
                    f"operation; one has none. Use Unrolled. ({error})"
                ) from error

    def __call__(self, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        pairs = [
            (p, t)
            for p, t in zip(self._pulled, tangents, strict=True)
            if p is not None and p.requires_grad and t is not None
        ]
        if not pairs:
            return [None] * len(self._live)
        pulled, given = zip(*pairs, strict=True)
        with missing_derivatives_told():
            pushed = torch.autograd.grad(pulled, self._dual, given, retain_graph=True, allow_unused=True)
        through = iter(pushed)
        return [next(through) if live else None for live in self._live]


def plus(total: Tensor | None, part: Tensor | None, weight: float = 1.0) -> Tensor | None:
    """The sum total + weight · part, for derivatives that may be None."""
    if part is None:
        return total
    part = part if weight == 1.0 else weight * part
    return part if total is None else _tree.summed(total, part)


def second_derivative_error(operation: str, reason: str) -> SecondDerivativeError:
    """The error in one form for all operations: required, got, what to do."""
    said = f"{operation} {reason}"
    way_out = next(way for sign, way in _WAYS_OUT if sign in said)
    return SecondDerivativeError(
        "a hypergradient differentiates the training gradient once more, which requires a second "
        f"derivative of every operation in train_loss; got {operation}: {reason}. To fix this, {way_out}."
    )


def _is_missing_derivative(error: RuntimeError) -> bool:
    """Whether torch raised because a second derivative does not exist."""
    text = str(error)
    signs = (
        "not implemented",
        "double backward",
        "Double backward",
        "differentiate twice",
        "forward AD",
        "jvp function",
    )
    return any(sign in text for sign in signs)
