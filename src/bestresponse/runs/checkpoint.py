"""Save and load a whole run: one file, written atomically, from which it continues as if it had not stopped."""

import contextlib
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from .._files import as_path, previous_of, replacing
from ..distributed import Group
from ..errors import ArgumentError, BestResponseWarning, Error, FileError
from ..passes import random_state
from .plain_data import as_data
from .recovery import Recovering
from .run import SavedRun
from .schema import RANKS, SAVED_RUN, Mismatch
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
    group = tuner.problem.group
    if group.sharded or group.own:
        got = (
            "sharded weights (fully_shard)"
            if group.sharded
            else "a table of each rank's own, Weights(sharded=True)"
        )
        raise ArgumentError(
            f"Tuner.save needs all weights and hyperparameters on rank 0; got {got}. Save the state dicts of model, "
            "hyper and both optimisers on each rank, for example with torch.distributed.checkpoint."
        )
    # A loaded run that has not continued yet is still at its saved position.
    where = tuner.resumed or {
        "streams": {name: stream.state() for name, stream in tuner.streams.items()},
        "random": random_state.snapshot(),
    }
    first, *others = group.gather(as_data(where, "streams"))
    failed = group.together(lambda: None if group.rank else _write(tuner, first, others, path, previous))
    # All ranks fail alike, so that the policy is the same on each.
    messages = group.gather("" if failed is None else str(failed))
    if failed is not None:
        raise failed
    if messages[0]:
        raise FileError(messages[0])


def _write(
    tuner: Recovering, where: dict[str, Any], others: list[dict[str, Any]], path: str | Path, previous: bool
) -> FileError | None:
    """Write the file, and return the error if that is not possible.

    ``where`` has the batches' position and the random state of rank 0, ``others`` of the rest.
    """
    content: dict[str, Any] = {
        "bestresponse": _FORMAT,
        **state_of(tuner),
        "last_good": tuner.last_good.state_dict(),
        "callbacks": callback_states(tuner),
        "progress": {name: getattr(tuner, name) for name in _PROGRESS},
        "settings": {name: getattr(tuner, name) for name in _SETTINGS},
        "ranks": others,
        **where,
    }
    content = {name: as_data(value, name) for name, value in content.items()}
    try:
        with replacing(path, "Tuner.save", previous) as file, _checksums():
            torch.save(content, file)
    except FileError as error:
        return error
    return None


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
        load_callback_states(tuner, content["callbacks"])
        for name in _PROGRESS:
            setattr(tuner, name, content["progress"][name])
        tuner.last_good.load_state_dict(content["last_good"])
        tuner.streams.clear()
        tuner.resumed = _place(content, tuner.problem.group)


def _place(content: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """The position in the batches and the random state of this rank; a new round if there were more or fewer ranks."""
    ranks = [{name: content[name] for name in ("streams", "random")}, *content.get("ranks", [])]
    if len(ranks) == group.size:
        return dict(ranks[group.rank])
    warnings.warn(
        f"the run was saved by {len(ranks)} processes and continues on {group.size}: each has other batches, so a new "
        "round of them begins.",
        BestResponseWarning,
        stacklevel=5,
    )
    if group.rank < len(ranks):
        return {"streams": {}, "random": ranks[group.rank]["random"]}
    before = random_state.snapshot()
    random_state.restore(ranks[0]["random"])
    random_state.seed_all(int(torch.randint(2**62, ())) + group.rank)
    state = random_state.snapshot()
    random_state.restore(before)
    return {"streams": {}, "random": state}


def callback_states(tuner: SavedRun) -> list[Any]:
    """The kind and the state of each callback that has one."""
    return [[type(c).__name__, c.state_dict()] for c in _stateful(tuner)]


def load_callback_states(tuner: SavedRun, saved: Sequence[Any]) -> None:
    """Restore `callback_states`, each in the next callback of its kind."""
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


def _stateful(tuner: SavedRun) -> list[Any]:
    return [c for c in tuner.callbacks if has_state("the callback", c)]


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
        RANKS("the other processes", content.get("ranks", []))
    except Mismatch as error:
        raise FileError(f"{advice}, which is something else: {error}.") from error
    return content


def _is_file(path: str | Path) -> bool:
    with contextlib.suppress(OSError, ValueError):  # a null character
        return Path(path).is_file()
    return False
