"""The state of a run: modules, optimisers, schedulers, and what the method remembers."""

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ArgumentError, BestResponseWarning
from ..memory import MethodState, settings_of
from .run import SavedRun

_MODULES = ("model", "hyper")
_PARTS = ("weight_optimizer", "hyper_optimizer", "weight_scheduler", "hyper_scheduler")
_KINDS = {"a number": int | float, "a text": str, "a list": list | tuple, "a dict": dict, "a tensor": Tensor}


def state_of(tuner: SavedRun) -> dict[str, Any]:
    """The state, whose tensors are the live ones."""
    return {
        "modules": {name: _module_state(getattr(tuner.problem, name)) for name in _MODULES},
        "parts": {name: [type(part).__name__, part.state_dict()] for name, part in _parts(tuner).items()},
        "method": method_state(tuner),
    }


def method_state(tuner: SavedRun) -> dict[str, Any]:
    """What the method remembers, for `load_method`."""
    states = {name: vars(tuner.problem.state(part)) for name, part in remembering(tuner).items()}
    return {"settings": settings_of(tuner.method), "states": states}


def check_state(tuner: SavedRun, saved: Mapping[str, Any]) -> None:
    """Raise if the tuner was made in another way than the one whose state this is."""
    for name in _MODULES:
        _check_module(name, getattr(tuner.problem, name), saved["modules"][name])
    parts = _parts(tuner)
    kinds = {name: type(part).__name__ for name, part in parts.items()}
    stored = {name: kind for name, (kind, _) in saved["parts"].items()}
    if kinds != stored:
        raise ArgumentError(
            f"the tuner must be made like the saved one, with {stored}; got {kinds}. Make it in the same way."
        )
    for name, part in parts.items():
        if difference := _difference(part, saved["parts"][name][1]):
            raise ArgumentError(f"{name} must be like the saved one: {difference}. Make it in the same way.")


def restore_state(tuner: SavedRun, saved: Mapping[str, Any], stacklevel: int = 2) -> None:
    """Restore the state, which `check_state` has passed."""
    for name, part in _parts(tuner).items():
        needed = _settings(part)
        try:
            part.load_state_dict(saved["parts"][name][1])
        except (ValueError, KeyError) as error:
            raise ArgumentError(f"{name} must be like the saved one: {error}") from error
        if missing := needed - _settings(part):
            raise ArgumentError(f"{name} must be like the saved one, which lacks {sorted(missing)}.")
    for name in _MODULES:
        _load_module(getattr(tuner.problem, name), saved["modules"][name])
    load_method(tuner, saved["method"], stacklevel + 1)


def has_state(name: str, part: object) -> bool:
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


def _parts(tuner: SavedRun) -> dict[str, Any]:
    """Optimisers and schedulers, and a function that moves the weights if it has a state."""
    parts = {name: getattr(tuner, name) for name in _PARTS}
    return {name: part for name, part in parts.items() if has_state(name, part)}


def remembering(tuner: SavedRun) -> dict[str, object]:
    """The method and its parts that have a state on the problem."""
    return {"method": tuner.method, **tuner.method.parts_that_remember()}


def _module_state(module: nn.Module) -> dict[str, Any]:
    """The state dict, and the buffers that it leaves out."""
    state = module.state_dict()
    return {"state": state, "buffers": {n: b.detach() for n, b in module.named_buffers() if n not in state}}


def _check_module(name: str, module: nn.Module, saved: Mapping[str, Any]) -> None:
    present, stored = _shapes(module.state_dict()), _shapes(saved["state"])
    if present != stored:
        differing = sorted(n for n in present.keys() | stored.keys() if present.get(n) != stored.get(n))
        raise ArgumentError(
            f"{name} must have the saved tensors; it differs in {differing[:5]}. Make it in the same way."
        )


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {n: (x.shape, x.dtype, x.layout) if isinstance(x, Tensor) else None for n, x in state.items()}


def _difference(part: Any, saved: Any) -> str:
    """What makes a saved state unfit for an optimiser or a scheduler; empty if nothing is known."""
    present = part.state_dict()
    if not isinstance(part, Optimizer):
        return _unlike(present, saved)
    if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
        return "state and param_groups are missing"
    groups = saved["param_groups"]
    if not isinstance(groups, list) or not all(isinstance(g, dict) for g in groups):
        return "its parameter groups are no dicts"
    sizes = [len(g["params"]) for g in present["param_groups"]]
    if sizes != (got := [len(g["params"]) if isinstance(g.get("params"), list) else 0 for g in groups]):
        return f"its parameter groups have {sizes} tensors, the saved ones {got}"
    for group, stored in zip(present["param_groups"], groups, strict=True):
        if group["params"] != stored["params"]:
            return "its parameter groups have another order"
        if unlike := _unlike(group, stored):
            return unlike
    return _unlike_tensors(part, saved["state"])


def _unlike(present: Any, saved: Any) -> str:
    """The first entry of a dict that has another kind of value; None and unknown kinds match everything."""
    if not isinstance(present, dict) or not isinstance(saved, dict):
        return "" if type(present) is type(saved) else f"the saved state is a {type(saved).__name__}"
    for name in present.keys() & saved.keys():
        kinds = _kind(present[name]), _kind(saved[name])
        if all(kinds) and kinds[0] != kinds[1]:
            return f"{name} is {kinds[0]}, the saved one {kinds[1]}"
    return ""


def _kind(value: Any) -> str | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return "a number"
    return next((name for name, kind in _KINDS.items() if isinstance(value, kind)), None)


def _unlike_tensors(optimizer: Optimizer, saved: Any) -> str:
    """The first tensor of torch's own optimisers that does not belong to its parameter."""
    if not isinstance(saved, dict) or not all(isinstance(x, dict) for x in saved.values()):
        return "its state is no dict of dicts"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if unknown := [key for key in saved if key not in range(len(parameters))]:
        return f"the saved state is of unknown parameters {unknown[:5]}"
    if not type(optimizer).__module__.startswith("torch.optim") or isinstance(
        optimizer, torch.optim.Adafactor
    ):
        return ""
    numbers = iter(range(len(parameters)))
    for group in optimizer.param_groups:
        own = [saved.get(number) for _, number in zip(group["params"], numbers, strict=False)]
        if len({frozenset(entries) for entries in own if entries}) > 1:
            return "its state of some tensors is incomplete"
    for number, entries in saved.items():
        shape = parameters[number].shape
        for name, x in entries.items():
            if isinstance(x, Tensor) and x.numel() != 1 and x.shape != shape:
                return (
                    f"{name} of parameter {number} has the shape {list(shape)}, the saved one {list(x.shape)}"
                )
    return ""


def _settings(part: Any) -> set[str]:
    """The settings that all groups of an optimiser have."""
    return set.intersection(*(set(g) for g in part.param_groups)) if isinstance(part, Optimizer) else set()


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


def load_method(tuner: SavedRun, saved: Mapping[str, Any], stacklevel: int = 3) -> None:
    """Restore the state of the method, or warn if it has other settings."""
    problem = tuner.problem
    if saved["settings"] != settings_of(tuner.method):
        warnings.warn(
            f"the method's state is not restored, since its settings differ: saved by {saved['settings']}, "
            f"got {settings_of(tuner.method)}.",
            BestResponseWarning,
            stacklevel=stacklevel,
        )
        problem.forget(tuner.method)
        return
    place = next(iter(problem.weights.values())).device
    for name, part in remembering(tuner).items():
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
