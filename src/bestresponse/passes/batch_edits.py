"""Checks that all passes on one batch see the same data, since a hypergradient runs the losses several times on it."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ..errors import ArgumentTypeError, EvaluationError, named
from .module_state import sum_of_bits


class EditedTensors:
    """The tensors of batches that passes edited in place, with sums of their bits after the last edit."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def differ(self, x: Tensor) -> bool:
        """Note an edit; whether the one before left other values, so that the edits add up."""
        bits = sum_of_bits(x)
        before = self._known.get(id(x))
        self._known = {key: pair for key, pair in self._known.items() if pair[0]() is not None}
        self._known[id(x)] = weakref.ref(x), bits
        return before is not None and before[0]() is x and before[1] != bits


@contextmanager
def batch_kept(name: str, batch: Any, known: EditedTensors) -> Iterator[None]:
    """Put the lists and dicts of a batch back as they were, and raise if the edits of its tensors in place add up.

    An edit that changes nothing when it is repeated, such as ``labels[labels == 0] = -100``, is harmless. It looks into
    lists, tuples, dicts and dataclasses.

    Raises:
        ArgumentTypeError: the batch is or has an iterator.
        EvaluationError: the edits of a tensor add up.
    """
    versions: list[tuple[Tensor, int]] = []
    contents: list[tuple[Any, Any]] = []
    for x in _parts(batch, set()):
        if isinstance(x, Iterator):
            raise ArgumentTypeError(
                f"{name} needs a batch that each of several passes can read; got {named(_places(batch, {id(x)}))} of "
                f"type {type(x).__name__}, which yields other data, or none, in the next pass. Give next(...) of it, "
                "or a list."
            )
        if isinstance(x, Tensor):
            if not x.is_inference():
                versions.append((x, x._version))
        else:
            contents.append((x, x.copy()))
    try:
        yield
    finally:
        for x, content in contents:
            _put_back(x, content)
    if edited := {id(x) for x, version in versions if x._version != version and known.differ(x)}:
        raise EvaluationError(
            f"{name} must leave its batch as it is; it changed {named(_places(batch, edited))} in place (div_, sub_, "
            "copy_ and the like), and again in another pass. A hypergradient runs the losses several times on a batch, "
            "so the changes add up. Write x = x / s for x.div_(s), or take a clone() first."
        )


def _parts(x: Any, seen: set[int]) -> Iterator[Any]:
    """The tensors, lists, dicts and iterators in a batch, once."""
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor | Iterator) or type(x) in (list, dict):
        yield x
    for _, value in _inside(x):
        yield from _parts(value, seen)


def _inside(x: Any) -> list[tuple[str, Any]]:
    """The tensors and collections in a collection, each with what one writes after its name."""
    if isinstance(x, dict):
        return [(f"[{key!r}]", value) for key, value in x.items() if _counts(value)]
    if isinstance(x, list | tuple):
        return [(f"[{number}]", value) for number, value in enumerate(x) if _counts(value)]
    if is_dataclass(x) and not isinstance(x, type):
        return [(f".{f.name}", v) for f in fields(x) if _counts(v := getattr(x, f.name, None))]
    return []


def _counts(x: Any) -> bool:
    if type(x) in (int, float, str, bool):  # of which a batch may have very many
        return False
    return isinstance(x, Tensor | dict | list | tuple | Iterator) or is_dataclass(x)


def _places(batch: Any, wanted: set[int]) -> list[str]:
    """Where the tensors with these identities are in a batch."""
    found, pending, seen = [], [("batch", batch)], set()
    while pending:
        place, x = pending.pop()
        if id(x) in wanted and id(x) not in seen:
            found.append(place)
        if id(x) not in seen:
            seen.add(id(x))
            pending += [(place + after, value) for after, value in reversed(_inside(x))]
    return found


def _put_back(x: Any, content: Any) -> None:
    """Give a list or dict its content back."""
    if isinstance(x, list):
        if len(x) != len(content) or any(a is not b for a, b in zip(x, content, strict=True)):
            x[:] = content
    elif list(x) != list(content) or any(x[key] is not value for key, value in content.items()):
        x.clear()
        x.update(content)
