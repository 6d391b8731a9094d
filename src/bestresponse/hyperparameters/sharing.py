"""Which weights share a hyperparameter: its name, and its shape."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import ArgumentError

Sharing = Literal["global", "tensor", "unit", "input", "weight"] | Callable[[str], str]

_MODULE = nn.Module()


def require_sharing(name: str, value: object) -> None:
    """Raise unless the value names which weights share a hyperparameter."""
    known = isinstance(value, str) and value in ("global", "tensor", "unit", "input", "weight")
    if not known and not callable(value):
        raise ArgumentError(
            f'{name} must be "global", "tensor", "unit", "input" or "weight", a function of a weight\'s name, or None; '
            f"got {value!r}."
        )


def places(root: str, per: Sharing, names: Sequence[str]) -> dict[str, str]:
    """The name of the parameter with the rate of each weight."""
    if not callable(per):
        return {name: root if per == "global" else f"{root}.{name}" for name in names}
    groups = {name: per(name) for name in names}
    parts = set(groups.values())
    for group in parts:
        inside = isinstance(group, str) and [g for g in parts if str(g).startswith(f"{group}.")]
        if not isinstance(group, str) or inside or not all(map(_names_a_part, group.split("."))):
            raise ArgumentError(
                "the functions WeightDecay.per and around must return the name of a group, such as 'encoder', which is "
                "not the beginning of another group's name, and no name of a method or attribute of a module; got "
                f"{group!r}."
            )
    return {name: f"{root}.{group}" for name, group in groups.items()}


def require_coarser(pairs: set[tuple[str, str]], parameters: Mapping[str, Tensor]) -> None:
    """Raise unless each parameter of differences is at least as fine as its only centre."""
    for place, centre in pairs:
        shapes = parameters[place].shape, parameters[centre].shape
        one = sum(other == place for other, _ in pairs) == 1
        if not one or not _fits(*shapes):
            raise ArgumentError(
                'WeightDecay.around must be coarser than per, such as around="tensor" for per="weight"; got rates of '
                f"shape {list(shapes[0])} for {place!r} with centres of shape {list(shapes[1])}."
            )


def shape_of(per: Sharing, w: Tensor) -> torch.Size:
    """The shape of the rates of a tensor."""
    if per == "weight" or (per == "unit" and w.ndim == 1):
        return w.shape
    if w.ndim < 2 or per not in ("unit", "input"):
        return torch.Size()
    kept = 0 if per == "unit" else 1
    return torch.Size(n if d == kept else 1 for d, n in enumerate(w.shape))


def _names_a_part(text: str) -> bool:
    """Whether a module can have a parameter of this name."""
    return bool(text) and not hasattr(_MODULE, text)


def _fits(fine: torch.Size, coarse: torch.Size) -> bool:
    """Whether a tensor of the coarse shape broadcasts to the fine one."""
    pairs = zip(reversed(fine), reversed(coarse), strict=False)
    return len(coarse) <= len(fine) and all(n in (1, m) for m, n in pairs)
