"""Checks that a pass leaves its batch as it is, since a hypergradient runs the losses several times on one batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from ..errors import EvaluationError, named


@contextmanager
def batch_kept(name: str, batch: Any) -> Iterator[None]:
    """Put the lists and dicts of a batch back as they were, and raise if the pass edited a tensor in place.

    It looks into lists, tuples, dicts and dataclasses.
    """
    versions: list[tuple[str, Tensor, int]] = []
    contents: list[tuple[Any, Any]] = []
    for place, x in _parts("batch", batch, set()):
        if isinstance(x, Tensor):
            if not x.is_inference():
                versions.append((place, x, x._version))
        else:
            contents.append((x, x.copy()))
    try:
        yield
    finally:
        for x, content in contents:
            _put_back(x, content)
    if edited := [place for place, x, version in versions if x._version != version]:
        raise EvaluationError(
            f"{name} must leave its batch as it is; it changed {named(edited)} in place (div_, sub_, copy_ and the "
            "like). A hypergradient runs the losses several times on one batch, so the changes would add up. Write "
            "x = x / s for x.div_(s), or take a clone() first."
        )


def _parts(place: str, x: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The tensors, lists and dicts in a batch, each with its place, once."""
    if id(x) in seen:
        return
    seen.add(id(x))
    if isinstance(x, Tensor):
        yield place, x
        return
    if type(x) in (list, dict):
        yield place, x
    if isinstance(x, dict):
        inside = [(f"{place}[{key!r}]", value) for key, value in x.items()]
    elif isinstance(x, list | tuple):
        inside = [(f"{place}[{number}]", value) for number, value in enumerate(x)]
    elif is_dataclass(x) and not isinstance(x, type):
        inside = [(f"{place}.{f.name}", getattr(x, f.name, None)) for f in fields(x)]
    else:
        return
    for there, value in inside:
        yield from _parts(there, value, seen)


def _put_back(x: Any, content: Any) -> None:
    """Give a list or dict its content back."""
    if isinstance(x, list):
        if len(x) != len(content) or any(a is not b for a, b in zip(x, content, strict=True)):
            x[:] = content
    elif list(x) != list(content) or any(x[key] is not value for key, value in content.items()):
        x.clear()
        x.update(content)
