"""The gradient of a function that is run again in each derivative, instead of keeping its graph."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import graph
from .tensors import will_run
from .unread import Unread, nothing


class Map(NamedTuple):
    """A function of the tensors before ``parameters``, which it reads itself, with a graph to both.

    ``keep`` says whether the graph has parts of others, which are not ours to free. The function is linear in the first
    ``linear`` tensors; it is called with True if only their graph is needed.
    """

    outputs: Callable[[Sequence[Tensor], bool], Sequence[Tensor | None]]
    parameters: Sequence[Tensor]
    keep: bool
    linear: int = 0


def gradient(
    function: Map, g: Sequence[Tensor | None], tensors: Sequence[Tensor], ctx: Any, without: bool = False
) -> Sequence[Tensor | None]:
    """The gradient of ⟨g, outputs⟩ with respect to those of all tensors to which the backward pass goes on."""
    nodes = [node for node, _ in ctx.next_functions]
    wanted = [x.requires_grad and will_run(n) for x, n in zip(tensors, nodes, strict=True)]
    settings = function, wanted, without, len(g)
    found: Sequence[Tensor | None] = _Gradient.apply(*settings, *g, *tensors)  # type: ignore[no-untyped-call]
    return found


class _Gradient(torch.autograd.Function):
    """The gradient of ⟨g, outputs⟩ with respect to wanted tensors, or zeros in its place.

    Its own derivative is again such a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Map, wanted: Sequence[bool], without: bool, count: int, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.function, ctx.wanted, ctx.count = function, wanted, count
        ctx.save_for_backward(*tensors)
        given = [x for x in tensors[count:] if x is not None]
        if without:
            return tuple(nothing(x, x.shape) if w else None for x, w in zip(given, wanted, strict=True))
        with torch.enable_grad():
            arguments = [x.detach().requires_grad_() for x in given[: len(given) - len(function.parameters)]]
            return tuple(_pulled(function, wanted, tensors[:count], arguments))

    @staticmethod
    def backward(ctx: Any, *v: Tensor | None) -> tuple[Tensor | None, ...]:
        function, wanted, tensors = ctx.function, ctx.wanted, ctx.saved_tensors
        given = [i for i in range(ctx.count) if tensors[i] is not None]

        def outputs(arguments: Sequence[Tensor], linear: bool) -> Sequence[Tensor | None]:
            g: list[Tensor | None] = [None] * ctx.count
            for i, x in zip(given, arguments, strict=False):
                g[i] = x
            found = _pulled(function, wanted, g, arguments[len(given) :], Unread(), linear)
            graph.inspect_gradient([x for x in found if x is not None], until=arguments)
            return found

        again = Map(outputs, function.parameters, function.keep, len(given))
        found = iter(gradient(again, v, [x for x in tensors if x is not None], ctx))
        return None, None, None, None, *(None if x is None else next(found) for x in tensors)


def _pulled(
    function: Map,
    wanted: Sequence[bool],
    g: Sequence[Tensor | None],
    arguments: Sequence[Tensor],
    unread: Unread | None = None,
    only: bool = False,
) -> list[Tensor | None]:
    """The gradient; with ``unread`` its graph, with ``only`` one that is right along ``g`` alone."""
    # A graph may be differentiated further along all tensors.
    linear = unread is None and function.linear > 0 and not any(wanted[function.linear :])
    with nullcontext() if unread is None else unread.noticed():
        outputs = function.outputs(arguments, linear)
    pairs = [
        (x, y) for x, y in zip(outputs, g, strict=True) if x is not None and y is not None and x.requires_grad
    ]
    live = list(compress([*arguments, *function.parameters], wanted))
    if not (pairs and live):
        return [None] * len(wanted)
    values, along = zip(*pairs, strict=True)
    again = unread is not None
    with nullcontext() if unread is None else unread.left_out(graph.nodes(values), only):
        found = iter(
            torch.autograd.grad(values, live, along, again or function.keep, again, allow_unused=True)
        )
    return [next(found) if x else None for x in wanted]
