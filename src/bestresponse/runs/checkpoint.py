"""Save and load a whole run: one file, written atomically, from which it continues as if it had not stopped."""

import contextlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import Group
from ..errors import ArgumentError, BestResponseWarning
from ..memory import MethodState, settings_of
from ..passes import random_state
from .plain_data import as_data
from .run import SavedRun

_FORMAT = 3
_PROGRESS = ("hyper_step", "weight_step", "history")
_SETTINGS = ("weight_steps", "warmup_steps", "clip_weights", "policy", "seed")
_MODULES = ("model", "hyper")
_PARTS = ("weight_optimizer", "hyper_optimizer", "weight_scheduler", "hyper_scheduler")


def save(tuner: SavedRun, path: str | Path) -> None:
    """Write everything that ``tuner`` needs to continue; see `Tuner.save`. Of several processes rank 0 writes."""
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
    group.together(lambda: None if group.rank else _write(_content(tuner, first, others), Path(path)))


def _content(tuner: SavedRun, where: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """All data of a run: ``where`` has the batches' position and the random state of rank 0, ``others`` of the rest."""
    problem = tuner.problem
    content: dict[str, Any] = {
        "bestresponse": _FORMAT,
        "modules": {name: _module_state(getattr(problem, name)) for name in _MODULES},
        "parts": {name: [type(part).__name__, part.state_dict()] for name, part in _parts(tuner).items()},
        "method": {
            "settings": settings_of(tuner.method),
            "states": {name: vars(problem.state(part)) for name, part in _remembering(tuner).items()},
        },
        "callbacks": [[type(c).__name__, c.state_dict()] for c in _stateful(tuner)],
        "progress": {name: getattr(tuner, name) for name in _PROGRESS},
        "settings": {name: getattr(tuner, name) for name in _SETTINGS},
        "ranks": others,
        **where,
    }
    return {name: as_data(value, name) for name, value in content.items()}


def _write(content: dict[str, Any], path: Path) -> None:
    """Write a file that is complete at any time."""
    if not path.name:
        raise ArgumentError(f"Tuner.save needs a path of a file that can be written; got {str(path)!r}.")
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise ArgumentError(
            f"Tuner.save needs a path of a file that can be written; got {str(path)!r}: {error.strerror}."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def load(tuner: SavedRun, path: str | Path) -> None:
    """Restore the saved run in ``tuner``; see `Tuner.load`."""
    content = _read(path)
    problem, parts, stateful = tuner.problem, _parts(tuner), _stateful(tuner)
    for name in _MODULES:
        _check_module(name, getattr(problem, name), content["modules"][name])
    kinds = {name: type(part).__name__ for name, part in parts.items()}
    saved = {name: kind for name, (kind, _) in content["parts"].items()}
    if kinds != saved:
        raise ArgumentError(
            f"the tuner must be made like the saved one, with {saved}; got {kinds}. Make it in the same way."
        )
    differing = [f"{n}={x!r}" for n, x in content["settings"].items() if getattr(tuner, n) != x]
    if differing:
        warnings.warn(
            f"the run continues with this tuner's settings; the saved one had {', '.join(differing)}.",
            BestResponseWarning,
            stacklevel=3,
        )
    _load_parts(parts, {name: state for name, (_, state) in content["parts"].items()})
    for name in _MODULES:
        _load_module(getattr(problem, name), content["modules"][name])
    _load_method(tuner, content["method"])
    for name in _PROGRESS:
        setattr(tuner, name, content["progress"][name])
    tuner.streams.clear()
    tuner.resumed = _place(content, tuner.problem.group)
    waiting = list(content["callbacks"])
    for callback in stateful:
        found = next((x for x in waiting if x[0] == type(callback).__name__), None)
        if found is not None:
            waiting.remove(found)
            callback.load_state_dict(found[1])


def _place(content: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """The position in the batches and the random state of this rank; a new round if there were more or fewer ranks."""
    ranks = [{name: content[name] for name in ("streams", "random")}, *content.get("ranks", [])]
    if len(ranks) == group.size:
        return dict(ranks[group.rank])
    warnings.warn(
        f"the run was saved by {len(ranks)} processes and continues on {group.size}: each has other batches, so a new "
        "round of them begins.",
        BestResponseWarning,
        stacklevel=4,
    )
    if group.rank < len(ranks):
        return {"streams": {}, "random": ranks[group.rank]["random"]}
    before = random_state.snapshot()
    random_state.restore(ranks[0]["random"])
    random_state.seed_all(int(torch.randint(2**62, ())) + group.rank)
    state = random_state.snapshot()
    random_state.restore(before)
    return {"streams": {}, "random": state}


def _parts(tuner: SavedRun) -> dict[str, Any]:
    """Optimisers and schedulers, and a function that moves the weights if it has a state."""
    parts = {name: getattr(tuner, name) for name in _PARTS}
    return {name: part for name, part in parts.items() if _has_state(name, part)}


def _remembering(tuner: SavedRun) -> dict[str, object]:
    """The method and its parts that have a state on the problem."""
    return {"method": tuner.method, **tuner.method.parts_that_remember()}


def _stateful(tuner: SavedRun) -> list[Any]:
    return [c for c in tuner.callbacks if _has_state("the callback", c)]


def _has_state(name: str, part: object) -> bool:
    """Whether it has a state to save and load.

    Raises:
        ArgumentError: it can only be saved, or only be loaded.
    """
    has, lacks = "state_dict", "load_state_dict"
    if not hasattr(part, has):
        has, lacks = lacks, has
    if hasattr(part, has) and not hasattr(part, lacks):
        raise ArgumentError(
            f"{name} must have both state_dict and load_state_dict, or neither; {type(part).__name__} has only {has}. "
            f"Add {lacks}, or leave both out if it has no state."
        )
    return hasattr(part, has)


def _load_parts(parts: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """All of them or none."""
    before: list[tuple[Any, Any]] = []
    for name, part in parts.items():
        earlier = part.state_dict()
        try:
            part.load_state_dict(states[name])
        except (ValueError, KeyError) as error:
            for other, state in before:
                other.load_state_dict(state)
            raise ArgumentError(f"{name} must be like the saved one: {error}") from error
        before.append((part, earlier))


def _read(path: str | Path) -> dict[str, Any]:
    advice = f"Tuner.load needs a file written by Tuner.save; got {str(path)!r}"
    if not Path(path).is_file():
        raise ArgumentError(f"{advice}, which does not exist.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any error from reading another kind of file
        raise ArgumentError(
            f"{advice}, which cannot be read: {str(error) or type(error).__name__}"
        ) from error
    if not isinstance(content, dict) or content.get("bestresponse") != _FORMAT or "random" not in content:
        raise ArgumentError(f"{advice}, which is something else.")
    return content


def _module_state(module: nn.Module) -> dict[str, Any]:
    """The state dict, and the buffers that it leaves out."""
    state = module.state_dict()
    return {"state": state, "buffers": {n: b for n, b in module.named_buffers() if n not in state}}


def _check_module(name: str, module: nn.Module, saved: Mapping[str, Any]) -> None:
    present, stored = _shapes(module.state_dict()), _shapes(saved["state"])
    if present != stored:
        differing = sorted(n for n in present.keys() | stored.keys() if present.get(n) != stored.get(n))
        raise ArgumentError(
            f"{name} must have the saved tensors; it differs in {differing[:5]}. Make it in the same way."
        )


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {n: (x.shape, x.dtype) if isinstance(x, Tensor) else None for n, x in state.items()}


@torch.no_grad()
def _load_module(module: nn.Module, saved: Mapping[str, Any]) -> None:
    module.load_state_dict(saved["state"])
    for name, value in saved["buffers"].items():
        place, _, leaf = name.rpartition(".")
        with contextlib.suppress(AttributeError):
            owner = module.get_submodule(place)
            before = owner._buffers.get(leaf)
            if before is not None and before.shape == value.shape:
                before.copy_(value)  # in place: it may be shared
            else:
                owner._buffers[leaf] = value if before is None else value.to(before.device)


def _load_method(tuner: SavedRun, saved: Mapping[str, Any]) -> None:
    problem = tuner.problem
    if saved["settings"] != settings_of(tuner.method):
        warnings.warn(
            f"the method's state is not restored, since its settings differ: saved by {saved['settings']}, "
            f"got {settings_of(tuner.method)}.",
            BestResponseWarning,
            stacklevel=4,
        )
        problem.forget(tuner.method)
        return
    place = next(iter(problem.weights.values())).device
    for name, part in _remembering(tuner).items():
        state = _placed(saved["states"].get(name, {}), problem.weights, place)
        problem.remember(part, MethodState(**state))


def _placed(value: Any, weights: Mapping[str, Tensor], place: torch.device) -> Any:
    """The same data with its tensors on the device of the weights."""
    if isinstance(value, Tensor):
        return value.to(place)
    if isinstance(value, dict):
        return {
            k: _placed(x, weights, weights[k].device if k in weights else place) for k, x in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_placed(x, weights, place) for x in value)
    return value
