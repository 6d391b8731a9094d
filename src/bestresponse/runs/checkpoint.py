"""Save and load a whole run: one file, written atomically, from which it continues as if it had not stopped."""

import contextlib
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._files import as_path, previous_of, replacing
from ..errors import ArgumentError, BestResponseWarning, Error, FileError
from ..passes import random_state
from .recovery import Recovering
from .schema import SAVED_RUN, Mismatch
from .state import check_state, has_state, restore_state, state_of

_FORMAT = 3
_PROGRESS = ("hyper_step", "weight_step", "history")
_SETTINGS = (
    "weight_steps",
    "warmup_steps",
    "clip_weights",
    "clip_hypergradient",
    "policy",
    "max_rise",
    "seed",
)


def save(tuner: Recovering, path: str | Path, previous: bool = False) -> None:
    """Write everything that ``tuner`` needs to continue; see `Tuner.save`.

    Args:
        tuner: the run.
        path: the file.
        previous: whether to keep the old file as ``path.previous``.
    """
    # A loaded run that has not continued yet is still at its saved position.
    where = tuner.resumed or {
        "streams": {name: stream.state() for name, stream in tuner.streams.items()},
        "random": random_state.snapshot(),
    }
    content: dict[str, Any] = {
        "bestresponse": _FORMAT,
        **state_of(tuner),
        "last_good": tuner.last_good.state_dict(),
        "callbacks": [[type(c).__name__, c.state_dict()] for c in _stateful(tuner)],
        "progress": {name: getattr(tuner, name) for name in _PROGRESS},
        "settings": {name: getattr(tuner, name) for name in _SETTINGS},
        **where,
    }
    content = {name: _as_data(value, name) for name, value in content.items()}
    with replacing(path, "Tuner.save", previous) as file, _checksums():
        torch.save(content, file)


def load(tuner: Recovering, path: str | Path) -> None:
    """Restore the saved run in ``tuner``, or change nothing; see `Tuner.load`."""
    content = _read(path)
    check_state(tuner, content)
    for state in content["last_good"]["states"]:
        check_state(tuner, state)
    differing = [f"{n}={x!r}" for n, x in content["settings"].items() if getattr(tuner, n, x) != x]
    if differing:
        warnings.warn(
            f"the run continues with this tuner's settings; the saved one had {', '.join(differing)}.",
            BestResponseWarning,
            stacklevel=3,
        )
    with _all_or_nothing(tuner):
        restore_state(tuner, content, stacklevel=5)
        _load_callbacks(tuner, content["callbacks"])
        for name in _PROGRESS:
            setattr(tuner, name, content["progress"][name])
        tuner.last_good.load_state_dict(content["last_good"])
        tuner.streams.clear()
        tuner.resumed = {"streams": content["streams"], "random": content["random"]}


def _load_callbacks(tuner: Recovering, saved: list[Any]) -> None:
    waiting = list(saved)
    for callback in _stateful(tuner):
        found = next((x for x in waiting if x[0] == type(callback).__name__), None)
        if found is not None:
            waiting.remove(found)
            callback.load_state_dict(found[1])


@contextmanager
def _all_or_nothing(tuner: Recovering) -> Iterator[None]:
    """After an error or an interrupt, the run is as it was."""
    state = deepcopy(state_of(tuner))
    callbacks = [(c, deepcopy(c.state_dict()), dict(getattr(c, "__dict__", {}))) for c in _stateful(tuner)]
    progress = {name: getattr(tuner, name) for name in (*_PROGRESS, "resumed")}
    streams, good = dict(tuner.streams), tuner.last_good.state_dict()
    try:
        yield
    except BaseException as error:
        restore_state(tuner, state)
        for callback, own, attributes in callbacks:
            callback.load_state_dict(own)
            for name, value in attributes.items():
                setattr(callback, name, value)
        for name, value in progress.items():
            setattr(tuner, name, value)
        tuner.streams.update(streams)
        tuner.last_good.load_state_dict(good)
        if isinstance(error, Error) or not isinstance(error, Exception):
            raise
        raise ArgumentError(
            f"Tuner.load needs a file of a run like this one; it could not restore it ({type(error).__name__}: "
            f"{error}), and changed nothing. Make the tuner in the same way."
        ) from error


def _stateful(tuner: Recovering) -> list[Any]:
    return [c for c in tuner.callbacks if has_state("the callback", c)]


def _as_data(value: Any, place: str) -> Any:
    """The same data as tensors and Python's own types, which can be read without running code.

    Raises:
        ArgumentError: the data holds something else; the message names the place.
    """
    if value is None or isinstance(value, bytes | Tensor | torch.Size | torch.dtype | torch.device):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):  # NumPy's float64 and enumerations of texts are subclasses
            return value if type(value) is kind else kind(value)
    if isinstance(value, dict):
        data = {_as_data(k, place): _as_data(x, f"{place}[{k!r}]") for k, x in value.items()}
        # A module's state keeps versions in an attribute; a counter or a default dict keeps its kind.
        unchanged = all(data.get(k) is x for k, x in value.items())
        return value if unchanged and type(value) in (OrderedDict, Counter) else data
    if type(value) in (list, tuple):
        return type(value)(_as_data(x, f"{place}[{i}]") for i, x in enumerate(value))
    if isinstance(value, set | frozenset):
        return set(_as_data(sorted(value), place))
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        return _as_data(value.tolist(), place)
    raise ArgumentError(
        f"Tuner.save can write only tensors and plain data (numbers, texts, lists, dicts); got a "
        f"{type(value).__name__} at {place}. Leave it out of that state_dict, or convert it to plain data."
    )


@contextmanager
def _checksums() -> Iterator[None]:
    """Torch writes the checksums of the parts, also if somebody turned them off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _read(path: str | Path) -> dict[str, Any]:
    """The content of a file, or of the file before it if that one is missing or damaged."""
    path = as_path("Tuner.load's path", path)
    try:
        return _read_alone(path)
    except FileError as error:
        try:
            previous = previous_of(path)
            content = _read_alone(previous)
        except (FileError, ValueError):  # or the path has a null character
            raise error from None
        warnings.warn(
            f"{error} The file before it is loaded, {previous.name!r}, from hyper-step "
            f"{content['progress']['hyper_step']}.",
            BestResponseWarning,
            stacklevel=4,
        )
        return content


def _read_alone(path: str | Path) -> dict[str, Any]:
    """The content of a file whose checksums and form are right.

    Raises:
        FileError: the file is missing, damaged, or something else.
    """
    advice = f"Tuner.load needs a file written by Tuner.save; got {str(path)!r}"
    if not _is_file(path):
        raise FileError(f"{advice}, which does not exist.")
    try:
        with Path(path).open("rb") as file:
            # torch does not verify the checksums.
            with zipfile.ZipFile(file) as parts:
                damaged = parts.testzip()
            file.seek(0)
            content = None if damaged else torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # any error from reading another kind of file
        raise FileError(
            f"{advice}, which cannot be read, since it is damaged or of another kind: "
            f"{str(error) or type(error).__name__}."
        ) from error
    if damaged:
        raise FileError(f"{advice}, which cannot be read: its part {damaged!r} is damaged.")
    if isinstance(content, dict):
        content.setdefault("last_good", {"states": [], "failed": False})  # absent in older files
    if not isinstance(content, dict) or content.get("bestresponse") != _FORMAT:
        raise FileError(f"{advice}, which is something else.")
    try:
        SAVED_RUN("the file", content)
    except Mismatch as error:
        raise FileError(f"{advice}, which is something else: {error}.") from error
    return content


def _is_file(path: str | Path) -> bool:
    with contextlib.suppress(OSError, ValueError):  # a null character
        return Path(path).is_file()
    return False
