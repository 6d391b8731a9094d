"""Hyperparameters by name, down to single entries, and the ranges that their modules declare."""

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from .protocol import Searchable

_LARGEST = 32  # the most entries that are searched without a space


def part(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """The view that a name denotes: "rates" is the whole tensor, "rates[0]" a row, "rates[0,1]" an entry."""
    base, _, index = name.removesuffix("]").partition("[")
    try:
        return tensors[name] if name in tensors else tensors[base][tuple(map(int, index.split(",")))]
    except (KeyError, ValueError, IndexError) as error:
        shapes = {key: list(tensor.shape) for key, tensor in itertools.islice(tensors.items(), 8)}
        raise ArgumentError(
            f'search.space must name a hyperparameter, or a part as in "rates[0,1]"; got {name!r}. The problem has '
            f"the shapes {shapes}."
        ) from error


def refuse_repeated(tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Raise if a name denotes nothing, or if two names denote the same entry."""
    counts = {name: torch.zeros(tensor.shape, dtype=torch.uint8) for name, tensor in tensors.items()}
    for name in names:
        if part(counts, name).add_(1).max() > 1:
            raise ArgumentError(
                f"search.space must name each entry once; {name!r} has one that another name has too."
            )


@torch.no_grad()
def write_(tensors: Mapping[str, Tensor], values: Mapping[str, float]) -> None:
    """Set hyperparameters by name."""
    for name, value in values.items():
        part(tensors, name).fill_(value)


def declared_ranges(hyper: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """The range of each entry that the modules declare; an outer module overrides an inner one.

    Raises:
        ArgumentError: a module names a parameter that it lacks, a hyperparameter has no range, or there are too many.
    """
    names = {id(tensor): name for name, tensor in tensors.items()}
    ranges: dict[str, tuple[float, float]] = {}
    for module in hyper.modules():
        if not isinstance(module, Searchable):
            continue
        own = dict(module.named_parameters())
        for name, limits in module.ranges().items():
            if name not in own:
                raise ArgumentError(
                    f"{type(module).__name__}.ranges must use the names of its parameters; got {name!r}. It has "
                    f"{list(own)[:5]}."
                )
            if id(own[name]) in names:
                ranges.setdefault(names[id(own[name])], limits)
    if missing := [name for name in tensors if name not in ranges]:
        raise ArgumentError(
            f"search needs a range for every hyperparameter; {missing[:5]} declare none. Pass a space, or add a method "
            "ranges() to their module."
        )
    if (size := sum(tensor.numel() for tensor in tensors.values())) > _LARGEST:
        raise ArgumentError(
            f"search takes at most {_LARGEST} hyperparameters without a space; {type(hyper).__name__} has {size:,}. "
            'Tune them by gradients with Tuner, let them share values (WeightDecay(per="tensor")), or give a space.'
        )
    return {
        f"{name}[{','.join(map(str, index))}]" if tensor.numel() > 1 else name: ranges[name]
        for name, tensor in tensors.items()
        for index in itertools.product(*map(range, tensor.shape))
    }
