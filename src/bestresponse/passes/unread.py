"""Gradients that nobody reads: of a training gradient a curvature needs the graph only, to differentiate it.

Forms of functions then leave values out, and put zeros without memory in their place.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from .tensors import Own

_present: ContextVar["Unread | None"] = ContextVar("_present", default=None)
_OWN = __name__.partition(".")[0]


class Unread:
    """The values of a gradient that are left out while its graph is made.

    All are computed if the graph has hooks or functions of others: these may read values, or may not be linear, such as
    those that clip gradients.
    """

    def __init__(self) -> None:
        self._now = self._all = self._kept = False

    @property
    def of_weights(self) -> bool:
        """Whether the values for weights are left out now, which nothing but a sum takes further."""
        return self._now and torch.is_grad_enabled()  # not in a gradient inside, whose values are read

    @property
    def of_all(self) -> bool:
        """Whether all values are left out now."""
        return self.of_weights and self._all

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Run the loss; the nodes of forms keep this object."""
        token = _present.set(self)
        try:
            yield
        finally:
            _present.reset(token)

    @contextmanager
    def left_out(self, nodes: Iterable[Any], all: bool = False) -> Iterator[None]:
        """Make the graph of a gradient.

        Args:
            nodes: those that made what it is the gradient of.
            all: whether it will be differentiated along what goes into it only. In that it is linear, so that no value
                is needed.
        """
        self.look_at(nodes)
        self._now, self._all = not self._kept, all
        try:
            yield
        finally:
            self._now = self._all = False

    def keep(self) -> None:
        """Note that values are needed."""
        self._kept = True

    def look_at(self, nodes: Iterable[Any]) -> None:
        """Note functions of others, and hooks of leaves, among the nodes of a graph."""
        for node in nodes:
            function = getattr(node, "_forward_cls", None)
            others = function is not None and function.__module__.partition(".")[0] != _OWN
            self._kept |= others or bool(hasattr(node, "variable") and node.variable._backward_hooks)


def present() -> Unread:
    """The object of the run of a loss that takes place now."""
    return _present.get() or Unread()


def may_hook(own: Own, *given: Any) -> Any:
    """The form of ``torch.Tensor.register_hook``, and of a read of ``grad_fn``, a node that takes hooks too."""
    present().keep()
    return own()


def ends_at(w: Tensor) -> bool:
    """Whether no operation but a sum takes the gradient of these weights further."""
    return type(w) is nn.Parameter and w.is_leaf


def nothing(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros without memory."""
    return like.new_zeros(()).expand(shape)
