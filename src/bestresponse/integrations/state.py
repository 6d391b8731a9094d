"""The state of a run whose weights, and whose optimiser of the weights, another library saves."""

from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError
from ..runs.checkpoint import callback_states, load_callback_states
from ..runs.plain_data import as_data
from ..runs.state import load_method, method_state
from ..tuner import Tuner

_PARTS = ("hyper_optimizer", "hyper_scheduler")
_PROGRESS = ("hyper_step", "weight_step", "history")


def state_of(tuner: Tuner, **more: Any) -> dict[str, Any]:
    """Hyperparameters, their optimiser and scheduler, the method's memory, callbacks and history, as plain data."""
    state = {
        "hyper": tuner.problem.hyper.state_dict(),
        "parts": {name: part.state_dict() for name in _PARTS if (part := getattr(tuner, name)) is not None},
        "method": method_state(tuner),
        "callbacks": callback_states(tuner),
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
    load_callback_states(tuner, state["callbacks"])
