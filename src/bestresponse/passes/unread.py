"""Gradients that nobody reads: of a training gradient a curvature needs the graph only, to differentiate it.

Forms of functions then leave values out, and put zeros without memory in their place.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_present: ContextVar["Unread | None"] = ContextVar("_present", default=None)


class Unread:
    """A gradient whose values are left out while its graph is made.

    Args:
        all: whether all values are left out, and not only those for weights, which nothing but a sum takes further. The
            graph is then right along its linear argument only, the gradient that goes in.
    """

    def __init__(self, all: bool = False) -> None:
        self.all, self._now = all, False

    @property
    def of_weights(self) -> bool:
        """Whether the values for weights are left out now."""
        return self._now

    @property
    def of_inputs(self) -> bool:
        """Whether the others are left out now."""
        return self._now and self.all

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Run the loss; the nodes of forms keep this object."""
        token = _present.set(self)
        try:
            yield
        finally:
            _present.reset(token)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Make the graph of the gradient."""
        self._now = True
        try:
            yield
        finally:
            self._now = False


def present() -> Unread:
    """The object of the run of a loss that takes place now."""
    return _present.get() or Unread()


def nothing(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros without memory."""
    return like.new_zeros(()).expand(shape)
