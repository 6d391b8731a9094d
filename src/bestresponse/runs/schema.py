"""The form of a saved run, which is checked before anything of it is used."""

import random
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

Check = Callable[[str, Any], None]


class Mismatch(Exception):
    """Something in a saved run has another form; the text names the place."""


def of(*kinds: type) -> Check:
    """A value of one of these types; a bool is not an int."""

    def check(place: str, value: Any) -> None:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise Mismatch(f"{place} must be {expected}; got {type(value).__name__}")

    return check


def anything(place: str, value: Any) -> None:
    """Any value."""


def count(place: str, value: Any) -> None:
    """An integer ≥ 0."""
    of(int)(place, value)
    if value < 0:
        raise Mismatch(f"{place} must be ≥ 0; got {value}")


def maybe(check: Check) -> Check:
    """None, or a value that passes the check."""
    return lambda place, value: None if value is None else check(place, value)


def each(check: Check) -> Check:
    """A list or tuple whose values pass the check."""

    def check_all(place: str, value: Any) -> None:
        of(list, tuple)(place, value)
        for index, item in enumerate(value):
            check(f"{place}[{index}]", item)

    return check_all


def pair(first: Check, second: Check) -> Check:
    """Two values."""

    def check(place: str, value: Any) -> None:
        of(list, tuple)(place, value)
        if len(value) != 2:
            raise Mismatch(f"{place} must have two entries; got {len(value)}")
        first(f"{place}[0]", value[0])
        second(f"{place}[1]", value[1])

    return check


def mapping(values: Check) -> Check:
    """A dict from texts to values that pass the check."""

    def check(place: str, value: Any) -> None:
        of(dict)(place, value)
        for key, item in value.items():
            of(str)(f"a key of {place}", key)
            values(f"{place}[{key!r}]", item)

    return check


def record(**fields: Check) -> Check:
    """A dict with these keys, and possibly others."""

    def check(place: str, value: Any) -> None:
        of(dict)(place, value)
        for name, field in fields.items():
            if name not in value:
                raise Mismatch(f"{place} must have {name!r}; it is missing")
            field(f"{place}[{name!r}]", value[name])

    return check


def generator_state(place: str, value: Any) -> None:
    """The name of a global generator, and a state that it takes."""
    pair(of(str), anything)(place, value)
    name, state = value
    try:
        if name == "random":
            random.Random().setstate(state)
        elif name == "numpy" and "numpy" in sys.modules:
            import_module("numpy").random.RandomState().set_state(state)
        elif name == "torch":
            torch.Generator().set_state(state)
        elif name != "numpy" and not (isinstance(state, Tensor) and state.dtype == torch.uint8):
            raise TypeError("no tensor of bytes")
    except Exception as error:  # each generator has its own
        raise Mismatch(f"{place} must be the state of a generator of random numbers; {error}") from error


def stream(place: str, value: Any) -> None:
    """The position of a collection of batches: none, the loader's own, or the batches taken and generators."""
    of(dict)(place, value)
    if value and "loader" not in value:
        opening = record(shared=each(generator_state), own=mapping(anything))
        record(taken=count, opening=opening, own=mapping(anything))(place, value)


def history(place: str, value: Any) -> None:
    """Rows, of which the last one has the time that the next run goes on from."""
    each(mapping(anything))(place, value)
    for row in value[-1:]:
        record(seconds=of(int, float))(f"the last row of {place}", row)


MODULE = record(state=mapping(anything), buffers=mapping(of(Tensor)))
METHOD_STATE = record(solution=maybe(mapping(of(Tensor))), memory=mapping(anything))
STATE = {
    "modules": record(model=MODULE, hyper=MODULE),
    "parts": mapping(pair(of(str), anything)),
    "method": record(settings=of(str), states=mapping(METHOD_STATE)),
}
SAVED_RUN = record(
    **STATE,
    last_good=record(states=each(record(**STATE, hyper_step=count)), failed=of(bool)),
    callbacks=each(pair(of(str), anything)),
    progress=record(hyper_step=count, weight_step=count, history=history),
    settings=mapping(of(bool, int, float, str, type(None))),
    streams=mapping(stream),
    random=each(generator_state),
)
RANKS = each(record(streams=mapping(stream), random=each(generator_state)))
