"""Checkpoints that save memory in second derivatives too: each derivative runs the checkpointed block again.

Torch's own checkpoint runs a block again in the first backward pass. The graph of that pass, which a second derivative
needs, then keeps all that was computed. In this form the first derivative is a node that keeps only the block's inputs
and the gradient of its outputs. Its derivative runs the block, and the block's gradient, once more.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as of_torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import graph, random_state
from .rerun import Map, gradient
from .tensors import eager
from .unread import present

_active: ContextVar[bool] = ContextVar("_active", default=False)
_inside: ContextVar[bool] = ContextVar("_inside", default=False)
_lock, _users = Lock(), [0]
# Calls of torch's checkpoint look here for what to call, however they have imported it.
_RAW: Any = getattr(of_torch.checkpoint, "__wrapped__", of_torch.checkpoint)
_PLACE = "__dynamo_disable"
_OPTIONS = {"use_reentrant", "debug", "context_fn", "preserve_rng_state", "determinism_check", "early_stop"}


@contextmanager
def recomputed(alone: bool = True) -> Iterator[None]:
    """Run non-reentrant checkpoints of this thread in this form, if the process works ``alone``.

    It is for a pass whose loss the caller differentiates as a whole, with respect to leaves. With several processes,
    blocks may hold collective calls, and checkpoints stay those of torch.
    """
    with _lock:
        if not _users[0]:
            _users[1:] = [vars(_RAW).get(_PLACE)]
            setattr(_RAW, _PLACE, _called)
        _users[0] += 1
    token = _active.set(alone)
    try:
        yield
    finally:
        _active.reset(token)
        with _lock:
            _users[0] -= 1
            if not _users[0]:
                setattr(_RAW, _PLACE, _users.pop())


def _called(function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint``."""

    def own() -> Any:
        return _RAW(function, *args, **settings)

    usual = settings.get("use_reentrant") is False and not settings.get("debug", False)
    usual = usual and settings.get("context_fn", of_torch.noop_context_fn) is of_torch.noop_context_fn
    if not (_active.get() and usual and settings.get("preserve_rng_state", True) and _possible()):
        return own()
    named = {n: x for n, x in settings.items() if n not in _OPTIONS}
    token, nested = _active.set(False), _inside.set(True)  # a checkpoint inside the block is torch's own
    try:
        return _in_form(function, args, named, own)
    finally:
        _inside.reset(nested)
        _active.reset(token)


def inside_block() -> bool:
    """Whether a block runs for the first time in this form."""
    return _inside.get()


def _possible() -> bool:
    return (
        torch.is_grad_enabled()
        and eager([])
        and not torch._C._are_functorch_transforms_active()
        and torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None
    )


def _in_form(function: Any, args: Any, named: dict[str, Any], own: Callable[[], Any]) -> Any:
    while isinstance(function, partial):
        function, args, named = function.func, (*function.args, *args), {**function.keywords, **named}
    given, structure = tree_flatten((args, named))
    moving = [i for i, x in enumerate(given) if isinstance(x, Tensor) and x.requires_grad]
    inputs = [given[i] for i in moving]
    block = _Block(function, given, structure, moving)
    copies = [x.detach().requires_grad_() for x in inputs]
    begin = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    outputs, shape = tree_flatten(block.run(copies))
    live = [i for i, x in enumerate(outputs) if isinstance(x, Tensor) and x.requires_grad]
    nodes = list(graph.nodes(outputs[i] for i in live))
    graph.inspect_nodes(nodes)
    present().look_at(nodes)
    if any(_of_weights_alone(outputs[i], copies) for i in live):
        random_state.restore(block.random)
        return own()
    block.kinked = any(map(graph.is_kinked, nodes))
    block.holds = any(n._sequence_nr() < begin for n in nodes if not hasattr(n, "variable"))
    found = {id(leaf): leaf for i in live for leaf in graph.variables(outputs[i])}
    parameters = [leaf for leaf in found.values() if all(leaf is not x for x in copies)]
    values = block.remember([outputs[i].detach() for i in live], live)
    del found, copies
    made = _Outputs.apply(block, values, len(inputs), *inputs, *parameters)  # type: ignore[no-untyped-call]
    for i, x in zip(live, made, strict=True):
        outputs[i] = x
    return tree_unflatten(outputs, shape)


def _of_weights_alone(output: Tensor, inputs: Sequence[Tensor]) -> bool:
    """Whether a block takes an absolute value or norm of weights: the whole loss must show where weights lie on it."""
    for node in graph.nodes([output]):
        if node.name().startswith(("Abs", "LinalgVectorNorm")):
            below = {id(n.variable) for n in graph.below(node) if hasattr(n, "variable")}
            if below.isdisjoint(map(id, inputs)):
                return True
    return False


class _Block:
    """A checkpointed part, with its fixed arguments and the random state and precision in which it first ran.

    Attributes:
        holds: whether it holds tensors with a graph of their own besides its arguments.
        kinked: whether it has an operation whose derivative jumps.
    """

    holds = kinked = False

    def __init__(
        self, function: Callable[..., Any], given: list[Any], structure: Any, moving: list[int]
    ) -> None:
        self._function, self._structure, self._moving = function, structure, moving
        self._given = [None if i in moving else x for i, x in enumerate(given)]
        self.random = random_state.snapshot()
        self._precisions = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds()
        ]
        self._cached = torch.is_autocast_cache_enabled()
        self._live: list[int] = []
        self._expected: list[tuple[torch.Size, float]] = []

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """The results, with a graph from these inputs."""
        given = list(self._given)
        for i, x in zip(self._moving, inputs, strict=True):
            given[i] = x
        args, named = tree_unflatten(given, self._structure)
        with torch.enable_grad():
            return self._function(*args, **named)

    def remember(self, values: list[Tensor], live: list[int]) -> list[Tensor]:
        """Note what later runs must give."""
        self._live = live
        self._expected = [(x.shape, _size(x)) for x in values]
        return values

    def again(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs that have a derivative, in another run."""
        before = random_state.snapshot()
        with ExitStack() as stack:
            for kind, enabled, dtype in self._precisions:
                stack.enter_context(
                    torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=self._cached)
                )
            random_state.restore(self.random)
            try:
                results, _ = tree_flatten(self.run(inputs))
            finally:
                random_state.restore(before)
        outputs = [results[i] for i in self._live]
        expected = zip(outputs, self._expected, strict=True)
        same = [x.shape == shape and _near(_size(x), size) for x, (shape, size) in expected]
        if not all(same):
            raise of_torch.CheckpointError("torch.utils.checkpoint: another run of a block has other outputs")
        return outputs


def _kinds() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _size(x: Tensor) -> float:
    return float(
        torch.linalg.vector_norm(x.detach().flatten(), dtype=torch.promote_types(x.dtype, torch.float32))
    )


def _near(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= 1e-2 * abs(other) or (math.isnan(one) and math.isnan(other))


class _Outputs(torch.autograd.Function):
    """The outputs of a block as a function of its inputs and of the parameters inside."""

    @staticmethod
    def forward(
        ctx: Any, block: _Block, values: list[Tensor], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.block, ctx.count, ctx.kinked, ctx.unread = block, count, block.kinked, present()
        ctx.save_for_backward(*tensors)
        outputs = tuple(values)
        values.clear()
        return outputs

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        tensors, block = ctx.saved_tensors, ctx.block
        function = Map(lambda inputs, _: block.again(inputs), tensors[ctx.count :], block.holds)
        return None, None, None, *gradient(function, g, tensors, ctx, ctx.unread.of_all)
