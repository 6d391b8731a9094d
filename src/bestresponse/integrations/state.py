"""The state of a run whose weights, and whose optimiser of the weights, another library saves."""

from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError
from ..memory import settings_of
from ..runs.checkpoint import _stateful
from ..runs.plain_data import as_data
from ..runs.state import load_method, remembering
from ..tuner import Tuner

_PARTS = ("hyper_optimizer", "hyper_scheduler")
_PROGRESS = ("hyper_step", "weight_step", "history")


def state_of(tuner: Tuner, **more: Any) -> dict[str, Any]:
    """Hyperparameters, their optimiser and scheduler, the method's memory, callbacks and history, as plain data."""
    problem = tuner.problem
    state = {
        "hyper": problem.hyper.state_dict(),
        "parts": {name: part.state_dict() for name in _PARTS if (part := getattr(tuner, name)) is not None},
        "method": {
            "settings": settings_of(tuner.method),
            "states": {name: vars(problem.state(part)) for name, part in remembering(tuner).items()},
        },
        "callbacks": [[type(c).__name__, c.state_dict()] for c in _stateful(tuner)],
        "progress": {name: getattr(tuner, name) for name in _PROGRESS},
        **more,
    }
    return {name: as_data(value, name) for name, value in state.items()}


def load_state(tuner: Tuner, state: Mapping[str, Any]) -> None:
    """Restore a `state_of` in a tuner that was made in the same way."""
    parts = {name: part for name in _PARTS if (part := getattr(tuner, name)) is not None}
    if parts.keys() != state["parts"].keys():
        raise ArgumentError(
            f"tuning must be made like the saved one, with {sorted(state['parts'])}; got {sorted(parts)}. Make it in "
            "the same way."
        )
    try:
        tuner.problem.hyper.load_state_dict(state["hyper"])
        for name, part in parts.items():
            part.load_state_dict(state["parts"][name])
    except (RuntimeError, ValueError, KeyError) as error:
        raise ArgumentError(
            f"the hyperparameters and their optimiser must be like the saved ones: {error}"
        ) from error
    load_method(tuner, state["method"])
    for name in _PROGRESS:
        setattr(tuner, name, state["progress"][name])
    waiting = list(state["callbacks"])
    for callback in _stateful(tuner):
        found = next((x for x in waiting if x[0] == type(callback).__name__), None)
        if found is not None:
            waiting.remove(found)
            callback.load_state_dict(found[1])
