"""States as plain data, which can be read from a file without running code."""

from collections import Counter, OrderedDict
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError


def as_data(value: Any, place: str) -> Any:
    """The same data as tensors and Python's own types, which can be read without running code.

    Raises:
        ArgumentError: the data holds something else; the message names the place.
    """
    if type(value) in (float, int, str, bool):  # first, since a long history consists of them
        return value
    if value is None or isinstance(value, bytes | Tensor | torch.Size | torch.dtype | torch.device):
        return value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):  # NumPy's float64 and enumerations of texts are subclasses
            return value if type(value) is kind else kind(value)
    if isinstance(value, dict):
        data = {as_data(k, place): as_data(x, f"{place}[{k!r}]") for k, x in value.items()}
        # A module's state keeps versions in an attribute; a counter or a default dict keeps its kind.
        unchanged = all(data.get(k) is x for k, x in value.items())
        return value if unchanged and type(value) in (OrderedDict, Counter) else data
    if type(value) in (list, tuple):
        return type(value)(as_data(x, f"{place}[{i}]") for i, x in enumerate(value))
    if isinstance(value, set | frozenset):
        return set(as_data(sorted(value), place))
    if hasattr(value, "tolist"):  # NumPy's numbers and arrays
        return as_data(value.tolist(), place)
    raise ArgumentError(
        f"Tuner.save can write only tensors and plain data (numbers, texts, lists, dicts); got a "
        f"{type(value).__name__} at {place}. Leave it out of that state_dict, or convert it to plain data."
    )
