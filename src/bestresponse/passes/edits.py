"""Checks that weights and hyperparameters do not change in a pass, and names the loss that edits them."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from ..errors import EvaluationError, named
from .batch_edits import EditedTensors
from .module_state import put_back, same_bits, sum_of_bits


class Edits:
    """Compares weights and hyperparameters before and after a pass, and raises if they changed.

    The first hypergradient of a problem compares values, which also shows edits through ``.data``. Later ones
    compare values if the first one met an edit in place, and otherwise the versions of the tensors.

    Attributes:
        first: whether the first hypergradient runs now.
        done: whether the first hypergradient is complete.
        silent: identities of other tensors that change without a new version.
        room: the bytes of other tensors that are copied, to be restored by value; None for the usual ones.
        drifted: whether a tensor changed that was not copied for lack of this room.
        of_batches: the edits of batches.
    """

    def __init__(self) -> None:
        self.first = self.done = False
        self.room: int | None = None
        self.drifted = False
        self.silent: set[int] = set()
        self.of_batches = EditedTensors()
        self._edited: set[str] = set()

    def with_room(self, room: int | None) -> "Edits":
        """The same for a copy of the modules."""
        other = copy.copy(self)
        other.room = room
        return other

    def drift(self) -> bool:
        """Note that a tensor is not restored; return whether that is for lack of room."""
        self.drifted = self.room is not None
        return self.drifted

    @contextmanager
    def whole(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Compare before and after the first hypergradient, backward passes included: sums of all bits, no copy."""
        if self.done:
            yield
            return
        self.first = True
        try:
            before = {key: sum_of_bits(x) for key, x in tensors.items()}
            yield
            if moved := [key for key, x in tensors.items() if sum_of_bits(x) != before[key]]:
                raise _moved("a hypergradient's backward pass", moved, "They could not be restored.")
            self.done = True
        finally:
            self.first = False

    @contextmanager
    def over(self, name: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Raise if one pass of the loss with this name changes one of these."""
        versions = {key: x._version for key, x in tensors.items()}
        kept = {key: x for key, x in tensors.items() if self.first or key in self._edited}
        with unmoved(name, kept):
            yield
        edited = [key for key, version in versions.items() if tensors[key]._version != version]
        if self.first:
            self._edited.update(edited)
        elif self.done and (unseen := [key for key in edited if key not in self._edited]):
            raise _moved(name, unseen, "They could not be restored.")


@contextmanager
def unmoved(name: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Restore tensors whose values differ at the end, and raise unless another error was raised."""
    kept = {key: x.detach().clone() for key, x in tensors.items()}
    moved: list[str] = []
    try:
        yield
    finally:
        for key, x in tensors.items():
            if not same_bits(x, kept[key]):
                put_back(x, kept[key])
                moved.append(key)
    if moved:
        raise _moved(name, moved, "Their values have been restored.")


def _moved(name: str, keys: list[str], end: str) -> EvaluationError:
    return EvaluationError(
        f"{name} must leave weights and hyperparameters as they are; it changed the values of {named(keys)} in place "
        "(clamp_, copy_, .data and the like), which autograd does not see. Compute bounded or normalised weights from "
        "the parameters in forward (torch.nn.utils.parametrize), move parameters after the optimiser's step, and "
        f"initialise by data before the problem is used. {end}"
    )
