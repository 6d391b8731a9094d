"""The batches of a collection in repeated rounds, with a position that can be saved and restored."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..batches import Batches
from ..errors import ArgumentError, ArgumentTypeError, BestResponseWarning
from ..passes import random_state


class Stream:
    """A collection's batches, each round a new ``iter()``.

    To restore a position, the stream starts the round from its initial random states and skips
    its first batches; a loader with ``state_dict`` and ``load_state_dict`` restores its position itself.
    """

    def __init__(self, name: str, batches: Iterable[Any]) -> None:
        if not isinstance(batches, Iterable):
            raise ArgumentTypeError(
                f"{name} must be a collection of batches; got {type(batches).__name__}. Pass a DataLoader or a list."
            )
        if isinstance(batches, str | bytes | Mapping) or (isinstance(batches, Tensor) and not batches.ndim):
            raise ArgumentTypeError(
                f"{name} must be a collection of batches; got a {type(batches).__name__}. Pass [batch] for one batch."
            )
        if isinstance(batches, Batches):
            raise ArgumentTypeError(
                f"{name} must be a collection of batches; got Batches, which stands for one batch. Pass [Batches(...)] "
                "to use all of them at each step, or a list to use one after the other."
            )
        if isinstance(batches, tuple) and batches and all(isinstance(part, Tensor) for part in batches):
            raise ArgumentTypeError(
                f"{name} must be a collection of batches; got a tuple of {len(batches)} tensors, which looks like one "
                "batch. Pass [batch]; or a list of tensors, if each is a batch."
            )
        if isinstance(batches, Iterator):
            raise ArgumentError(
                f"{name} must be a collection that can be iterated repeatedly; got the iterator "
                f"{type(batches).__name__}, which is empty after one epoch. Pass the loader itself, or list(...)."
            )
        self.name, self.batches = name, batches
        self._iterator: Iterator[Any] | None = None
        self._taken = 0
        self._opening: dict[str, Any] = {}

    def __next__(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._begin()
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._iterator = None
                if self._taken == 0:
                    break
                continue
            self._taken += 1
            return batch
        raise ArgumentError(
            f"{self.name} must hold at least one batch; got none. Is drop_last dropping all of it?"
        )

    def state(self) -> dict[str, Any]:
        """The position of the stream, as data that can be saved."""
        if self._iterator is None:
            return {}
        position = self._position()
        if position is not None:
            return {"loader": position}
        if getattr(self.batches, "persistent_workers", False):
            warnings.warn(
                f"{self.name} has persistent workers, whose state cannot be restored: from the second round "
                "on a restored run gets other batches. Use persistent_workers=False, or a loader with a state_dict "
                "(torchdata's StatefulDataLoader).",
                BestResponseWarning,
                stacklevel=2,
            )
        own = random_state.states_of(self._generators())
        return {"taken": self._taken, "opening": self._opening, "own": own}

    def find(self, state: dict[str, Any]) -> None:
        """Go to the position of a stream of the same collection; the caller restores the global random state."""
        if "loader" in state:
            self.batches.load_state_dict(state["loader"])  # type: ignore[attr-defined]
            self._begin()
            self._taken = 1  # an empty rest of a round does not mean an empty collection
        elif state:
            random_state.restore(state["opening"]["shared"])
            random_state.set_states(self._generators(), state["opening"]["own"])
            self._begin()
            assert self._iterator is not None
            for _ in range(state["taken"]):
                if next(self._iterator, self) is self:
                    raise ArgumentError(
                        f"{self.name} must be the collection that the run was saved with, {state['taken']} batches "
                        f"into a round; got one of {self._taken}. Pass the same one."
                    )
                self._taken += 1
            random_state.set_states(self._generators(), state["own"])

    def _begin(self) -> None:
        self._opening = {"shared": random_state.snapshot(), "own": random_state.states_of(self._generators())}
        self._iterator, self._taken = iter(self.batches), 0

    def _position(self) -> Any:
        """The position that the collection keeps itself; None if it keeps none."""
        batches: Any = self.batches
        if not all(callable(getattr(batches, name, None)) for name in ("state_dict", "load_state_dict")):
            return None
        try:
            return batches.state_dict()
        except (
            AttributeError
        ):  # accelerate's loader has the method, but a state only if the inner loader has one
            return None

    def _generators(self) -> dict[str, Any]:
        return random_state.generators(self.batches)
