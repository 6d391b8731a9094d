"""The random state of every generator that a loss or a loader may draw from."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

State = list[tuple[str, Any]]
# What collections are made of: DataLoader, Subset, ConcatDataset, batch samplers, datasets with transforms.
_PARTS = ("dataset", "datasets", "sampler", "batch_sampler", "transform", "transforms")


def snapshot() -> State:
    """The states of torch's, Python's and (where it is loaded) NumPy's global generators, and of every device's."""
    states: State = [("torch", torch.get_rng_state()), ("random", random.getstate())]
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append(("numpy", numpy.random.get_state()))
    for module, index in _accelerators():
        states.append((f"device {index}", module.get_rng_state(index)))
    return states


def restore(states: State) -> None:
    """Restore a snapshot, without devices that no longer exist."""
    devices = {f"device {index}": (module, index) for module, index in _accelerators()}
    for name, state in states:
        if name == "torch":
            torch.set_rng_state(state)
        elif name == "random":
            random.setstate(state)
        elif name == "numpy":
            import_module("numpy").random.set_state(state)
        elif name in devices:
            module, index = devices[name]
            module.set_rng_state(state, index)


def same(one: State, other: State) -> bool:
    """Whether torch's generators have not moved between two snapshots."""
    return all(
        torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True) if isinstance(a, torch.Tensor)
    )


def seed_all(seed: int) -> None:
    """Seed every global generator."""
    # torch.manual_seed records the whole call stack for future devices, which takes a millisecond.
    (torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed)(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every global generator, and restore their states afterwards."""
    states = snapshot()
    try:
        seed_all(seed)
        yield
    finally:
        restore(states)


def kinds() -> tuple[type, ...]:
    """The classes of generators, as far as their modules are loaded."""
    numpy = sys.modules.get("numpy")
    own = [numpy.random.Generator, numpy.random.RandomState] if numpy is not None else []
    return (torch.Generator, random.Random, *own)


def generators(owner: object, place: str = "") -> dict[str, Any]:
    """The generators that are attributes of a collection, or of what it is made of, by place and name."""
    found = {}
    for name, value in getattr(owner, "__dict__", {}).items():
        if isinstance(value, kinds()):
            found[place + name] = value
        elif name in _PARTS:
            for number, part in enumerate(value if isinstance(value, list | tuple) else [value]):
                found |= generators(part, f"{place}{name}[{number}].")
    return found


def states_of(own: dict[str, Any]) -> dict[str, Any]:
    """The states of `generators`."""
    return {name: _state(generator) for name, generator in own.items()}


def set_states(own: dict[str, Any], states: dict[str, Any]) -> None:
    """Restore the states of `generators`, by name."""
    for name in own.keys() & states.keys():
        generator, state = own[name], states[name]
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        elif hasattr(generator, "set_state"):  # NumPy's older kind
            generator.set_state(state)
        else:
            generator.bit_generator.state = state


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def _accelerators() -> list[tuple[Any, int]]:
    if not torch.accelerator.is_available():
        return []
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return [(module, index) for index in range(torch.accelerator.device_count())]
