"""Save and load a whole run: one file, written atomically, from which it goes on as if nothing had happened."""

import contextlib
import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import _random
from .errors import ArgumentError, BestResponseWarning
from .problem import MethodState, settings_of

if TYPE_CHECKING:
    from .tuner import Tuner

_FORMAT = 1
_COUNTERS = ("hyper_step", "weight_step")
_SETTINGS = ("weight_steps", "warmup_steps", "clip_weights", "policy", "seed")
_MODULES = ("model", "hyper")
_PARTS = ("weight_optimizer", "hyper_optimizer", "weight_scheduler", "hyper_scheduler")


def save(tuner: "Tuner", path: str | Path) -> None:
    """Write everything that ``tuner`` needs to go on; see `Tuner.save`."""
    problem = tuner.problem
    state = problem.state(tuner.method)
    content: dict[str, Any] = {
        "bestresponse": _FORMAT,
        "modules": {name: _module_state(getattr(problem, name)) for name in _MODULES},
        "parts": {name: part.state_dict() for name, part in _parts(tuner).items()},
        "method": {"settings": settings_of(tuner.method), "solution": state.solution, "memory": state.memory},
        "callbacks": [(type(c).__name__, c.state_dict()) for c in _stateful(tuner)],
        "counters": {name: getattr(tuner, name) for name in _COUNTERS},
        "settings": {name: getattr(tuner, name) for name in _SETTINGS},
        "history": [{key: _plain(value) for key, value in row.items()} for row in tuner.history],
        "streams": {name: stream.state() for name, stream in tuner.streams.items()},
        "random": _random.snapshot(),
    }
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        _read(part, mapped=True)  # a file that cannot be read shall not take the place of one that can
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(tuner: "Tuner", path: str | Path) -> None:
    """Put ``tuner`` where the run was that was saved; see `Tuner.load`."""
    content = _read(path)
    problem = tuner.problem
    differing = [f"{n}={x!r}" for n, x in content["settings"].items() if getattr(tuner, n) != x]
    if differing:
        warnings.warn(
            f"the run goes on with this tuner's settings; the saved one had {', '.join(differing)}.",
            BestResponseWarning,
            stacklevel=3,
        )
    for name in _MODULES:
        _check_module(name, getattr(problem, name), content["modules"][name])
    parts = _parts(tuner)
    if parts.keys() != content["parts"].keys():
        raise ArgumentError(
            f"the tuner must be made as the one that was saved, with {sorted(content['parts'])}; got "
            f"{sorted(parts)}. Make it in the same way."
        )
    _load_parts(parts, content["parts"])
    for name in _MODULES:
        _load_module(getattr(problem, name), content["modules"][name])
    _load_method(tuner, content["method"])
    waiting = list(content["callbacks"])
    for callback in _stateful(tuner):
        found = next((x for x in waiting if x[0] == type(callback).__name__), None)
        if found is not None:
            waiting.remove(found)
            callback.load_state_dict(found[1])
    for name in _COUNTERS:
        setattr(tuner, name, content["counters"][name])
    tuner.history = content["history"]
    tuner.streams.clear()
    tuner.resumed = {"streams": content["streams"], "random": content["random"]}


def _parts(tuner: "Tuner") -> dict[str, Any]:
    """Optimisers and schedulers; a function that moves the weights counts if it has a state."""
    parts = {name: getattr(tuner, name) for name in _PARTS}
    return {name: part for name, part in parts.items() if hasattr(part, "state_dict")}


def _stateful(tuner: "Tuner") -> list[Any]:
    return [c for c in tuner.callbacks if hasattr(c, "state_dict") and hasattr(c, "load_state_dict")]


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
            raise ArgumentError(f"{name} must be like the one that was saved: {error}") from error
        before.append((part, earlier))


def _plain(value: Any) -> Any:
    """A number of any kind as one of Python's; tensors and texts as they are."""
    if isinstance(value, Tensor | str | bool | int | None):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def _read(path: str | Path, mapped: bool = False) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ArgumentError(
            f"{path} must be a file written by Tuner.save; it cannot be read. A run can be saved whose optimisers, "
            "schedulers, loaders and callbacks have states of tensors and plain data (numbers, texts, lists, "
            f"dicts): {error}"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ArgumentError(
            f"{path} must be a file written by Tuner.save; it cannot be read: {error}"
        ) from error
    if not isinstance(content, dict) or content.get("bestresponse") != _FORMAT:
        raise ArgumentError(f"{path} must be a file written by Tuner.save; got something else.")
    return content


def _module_state(module: nn.Module) -> dict[str, Any]:
    """The state dict, and beside it the buffers that it leaves out."""
    state = module.state_dict()
    return {"state": state, "buffers": {n: b for n, b in module.named_buffers() if n not in state}}


def _check_module(name: str, module: nn.Module, saved: Mapping[str, Any]) -> None:
    present, stored = _shapes(module.state_dict()), _shapes(saved["state"])
    if present != stored:
        differing = sorted(n for n in present.keys() | stored.keys() if present.get(n) != stored.get(n))
        raise ArgumentError(
            f"{name} must have the tensors that were saved; it differs in {differing[:5]}. Make it in the same way."
        )


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {n: (x.shape, x.dtype) if isinstance(x, Tensor) else None for n, x in state.items()}


def _load_module(module: nn.Module, saved: Mapping[str, Any]) -> None:
    module.load_state_dict(saved["state"])
    for name, value in saved["buffers"].items():
        place, _, leaf = name.rpartition(".")
        with contextlib.suppress(AttributeError):
            owner = module.get_submodule(place)
            before = owner._buffers.get(leaf)
            owner._buffers[leaf] = value if before is None else value.to(before.device)


def _load_method(tuner: "Tuner", saved: Mapping[str, Any]) -> None:
    problem = tuner.problem
    if saved["settings"] != settings_of(tuner.method):
        warnings.warn(
            f"what the method remembers is not restored, since it has other settings: saved by {saved['settings']}, "
            f"got {settings_of(tuner.method)}.",
            BestResponseWarning,
            stacklevel=4,
        )
        problem.forget(tuner.method)
        return
    place = next(iter(problem.weights.values())).device
    solution, memory = (_placed(saved[key], problem.weights, place) for key in ("solution", "memory"))
    problem.remember(tuner.method, MethodState(solution, memory))


def _placed(value: Any, weights: Mapping[str, Tensor], place: torch.device) -> Any:
    """The same data with its tensors where the weights are."""
    if isinstance(value, Tensor):
        return value.to(place)
    if isinstance(value, dict):
        return {
            k: _placed(x, weights, weights[k].device if k in weights else place) for k, x in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_placed(x, weights, place) for x in value)
    return value
