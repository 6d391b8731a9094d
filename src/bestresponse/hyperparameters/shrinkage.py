"""Shrinkage of many hyperparameters towards a common value, so that they overfit the validation data less."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ArgumentTypeError, require, require_number

Groups = Literal["global", "tensor", "unit", "input"] | Callable[[str], Hashable]


@dataclass(frozen=True)
class Shrinkage:
    """After a step of the hyperparameters, move each towards the mean of its group: h ← h + τ (mean − h).

    An optimiser such as Adam or RMSprop with learning rate η moves an entry by at most about η a step. An entry
    whose hypergradient always has the same sign then ends at a distance of η / τ from its mean. An entry whose
    hypergradient is noise stays near the mean. ``strength`` = 0 leaves the hyperparameters free, and 1 gives all of a
    group one value.

    Args:
        strength: τ, the share of the distance, from 0 to 1.
        towards: a fixed value in place of the mean, in the units in which the module takes its initial value.
        within: the groups. "global": all entries of the module. "tensor": those of each parameter. "unit": those with
            the same first index, such as the weights into one unit. "input": those with the same second index. With
            "unit" and "input", all entries of a vector are one group. Or a function of a parameter's name; the
            parameters for which it returns the same value are one group.

    Raises:
        ArgumentError: an argument is out of its range.
    """

    strength: float
    towards: float | None = None
    within: Groups = "tensor"

    def __post_init__(self) -> None:
        require_number("Shrinkage.strength", self.strength)
        require(0 <= self.strength <= 1, "Shrinkage.strength", "between 0 and 1", self.strength)
        if self.towards is not None:
            require_number("Shrinkage.towards", self.towards)
        if self.within not in ("global", "tensor", "unit", "input") and not callable(self.within):
            raise ArgumentError(
                'Shrinkage.within must be "global", "tensor", "unit" or "input", or a function of a name; '
                f"got {self.within!r}."
            )

    @torch.no_grad()
    def apply_(self, parameters: Mapping[str, Tensor], factor: float, towards: float | None = None) -> None:
        """Shrink parameters in place, with the strength ``factor`` · τ.

        Where ``.grad`` is sparse, only the rows that it has move: the others took no step. Frozen parameters do not
        move, and do not count in a mean.

        Args:
            parameters: by name.
            factor: from 0 to 1, such as the current learning rate divided by the first one.
            towards: the value of `Shrinkage.towards` in the units of the parameters.
        """
        share = min(max(self.strength * factor, 0.0), 1.0)
        if share == 0.0:
            return
        for members in self._groups({n: p for n, p in parameters.items() if p.requires_grad}):
            target = self._mean(members) if towards is None else towards
            for p in members:
                rows = rows_of_the_step(p)
                if rows is None:
                    p.lerp_(_full(target, p), share)
                else:
                    p[rows] = p[rows].lerp(_full(target, p)[rows], share)

    def _groups(self, parameters: Mapping[str, Tensor]) -> Iterable[list[Tensor]]:
        if self.within == "global":
            return [list(parameters.values())] if parameters else []
        if not callable(self.within):
            return [[p] for p in parameters.values()]
        groups: dict[Hashable, list[Tensor]] = {}
        for name, p in parameters.items():
            groups.setdefault(self.within(name), []).append(p)
        return groups.values()

    def _mean(self, members: list[Tensor]) -> Tensor:
        """The mean of a group; of a single tensor for each unit or input, with dimensions of size one."""
        if self.within in ("unit", "input") and members[0].ndim > 1:
            kept = 0 if self.within == "unit" else 1
            return members[0].mean([d for d in range(members[0].ndim) if d != kept], keepdim=True)
        total = torch.stack([p.sum(dtype=torch.float64).to(members[0].device) for p in members]).sum()
        return total / max(1, sum(p.numel() for p in members))


def as_shrinkage(
    name: str, value: object, above: float = -math.inf, below: float = math.inf
) -> Shrinkage | None:
    """A number as a `Shrinkage` of this strength; None for None and 0.

    Raises:
        ArgumentError, ArgumentTypeError: it is neither, the number is out of its range, or ``towards`` is not between
            ``above`` and ``below``; the message has ``name``.
    """
    if isinstance(value, Shrinkage) and value.towards is not None:
        between = f"between {above:g} and {below:g}" if below < math.inf else f"above {above:g}"
        require(above < value.towards < below, f"{name}.towards", between, value.towards)
    if value is None or isinstance(value, Shrinkage):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{name} must be a number from 0 to 1 or a Shrinkage; got {value!r}.")
    require(0 <= value <= 1, name, "between 0 and 1", value)
    return Shrinkage(value) if value else None


class Shrunk(nn.Module):
    """Any module of hyperparameters, with shrinkage. Calling it calls ``module``.

    The wrapped module is the attribute ``module``, and its parameters have names that begin with ``module.``.

    Args:
        module: the module whose parameters shrink.
        shrinkage: a strength, or a `Shrinkage`. Its ``towards`` is in the units of the parameters.

    Raises:
        ArgumentError, ArgumentTypeError: ``module`` is not a module, or the strength is out of its range.
    """

    def __init__(self, module: nn.Module, shrinkage: float | Shrinkage) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(f"Shrunk.module must be a module; got {type(module).__name__}.")
        self.module = module
        self.shrinkage = as_shrinkage("Shrunk.shrinkage", shrinkage)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The value of the module."""
        return self.module(*arguments, **named)

    def shrink_(self, factor: float = 1.0) -> None:
        """Move the parameters towards the means of their groups, by the share ``factor`` · τ."""
        if self.shrinkage is not None:
            self.shrinkage.apply_(dict(self.module.named_parameters()), factor, self.shrinkage.towards)


def _full(target: Tensor | float, p: Tensor) -> Tensor:
    """The target in the parameter's precision and shape, without memory of its own."""
    return torch.as_tensor(target, dtype=p.dtype, device=p.device).expand_as(p)


def rows_of_the_step(p: Tensor) -> Tensor | None:
    """The rows for which a sparse gradient has values; None for a dense one."""
    if p.grad is None or p.grad.layout == torch.strided:
        return None
    rows: Tensor = torch.unique(p.grad.coalesce().indices()[0])
    return rows
