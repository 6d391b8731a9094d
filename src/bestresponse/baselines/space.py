"""What is searched: ranges by name, and the entries of hyperparameters that the names stand for."""

import itertools
import math
import re
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from ..errors import ArgumentError, ArgumentTypeError
from ..problem import Problem

if TYPE_CHECKING:
    from optuna.distributions import FloatDistribution, IntDistribution

    Distribution: TypeAlias = FloatDistribution | IntDistribution
    Space: TypeAlias = dict[str, Distribution]

_LARGEST = 32  # more than this are not searched unless a space asks for them


def distribution(name: str, given: Any) -> "Distribution":
    """A range as Optuna takes it."""
    from optuna.distributions import FloatDistribution, IntDistribution

    if isinstance(given, FloatDistribution | IntDistribution):
        return given
    numbers = isinstance(given, tuple | list) and all(isinstance(x, int | float) for x in given)
    if not numbers or len(given) != 2:
        raise ArgumentTypeError(
            f"search.space[{name!r}] must be (lowest, highest), or optuna's FloatDistribution or "
            f"IntDistribution; got {given!r}."
        )
    low, high = map(float, given)
    if not -math.inf < low < high < math.inf:
        raise ArgumentError(
            f"search.space[{name!r}] must be (lowest, highest), finite and in this order; got {given!r}."
        )
    return FloatDistribution(low, high)


def declared(problem: Problem) -> dict[str, tuple[float, float]]:
    """The ranges that the modules in ``hyper`` declare, by entry; raises where a hyperparameter has none."""
    names = {id(p): name for name, p in problem.hyperparameters.items()}
    ranges: dict[str, tuple[float, float]] = {}
    for module in problem.hyper.modules():
        # The class is asked, since a submodule of this name would be callable too.
        if not callable(declare := getattr(type(module), "ranges", None)):
            continue
        for own_name, limits in declare(module).items():
            try:
                parameter = module.get_parameter(own_name)
            except AttributeError as error:
                raise ArgumentError(
                    f"{type(module).__name__}.ranges must use the names of its parameters; got {own_name!r}. "
                    f"It has {[n for n, _ in module.named_parameters()][:5]}."
                ) from error
            if id(parameter) in names:
                ranges.setdefault(names[id(parameter)], limits)
    if missing := [name for name in problem.hyperparameters if name not in ranges]:
        raise ArgumentError(
            f"search needs a range for every hyperparameter; {missing[:5]} declare none. Give a space, or a method "
            "ranges() to their module."
        )
    size = sum(p.numel() for p in problem.hyperparameters.values())
    if size > _LARGEST:
        raise ArgumentError(
            f"search is for few hyperparameters, by default at most {_LARGEST}; {type(problem.hyper).__name__} has "
            f'{size:,}. Tune them by gradients with Tuner, let them share values (WeightDecay(per="tensor")), or '
            "give a space."
        )
    return {entry: ranges[name] for name, p in problem.hyperparameters.items() for entry in _entries(name, p)}


def check_names(problem: Problem, names: Mapping[str, object]) -> None:
    """Raise for a name that the problem does not have, and for an entry that two names stand for."""
    taken = {id(p): torch.zeros(p.shape, dtype=torch.bool) for p in problem.hyperparameters.values()}
    for name in names:
        parameter, index = _entry(problem, name)
        if taken[id(parameter)][index].any():
            raise ArgumentError(
                f"search.space must name each entry once; {name!r} has one that another name has too."
            )
        taken[id(parameter)][index] = True


@torch.no_grad()
def write_(problem: Problem, values: Mapping[str, float]) -> None:
    """Set hyperparameters by name."""
    for name, value in values.items():
        parameter, index = _entry(problem, name)
        parameter[index].fill_(value)


def _entries(name: str, parameter: nn.Parameter) -> list[str]:
    if parameter.numel() == 1:
        return [name]
    places = itertools.product(*map(range, parameter.shape))
    return [f"{name}[{','.join(map(str, place))}]" for place in places]


def _entry(problem: Problem, name: str) -> tuple[nn.Parameter, tuple[int, ...]]:
    """The parameter and the index that a name stands for; the empty index is the whole tensor."""
    if name in problem.hyperparameters:
        return problem.hyperparameters[name], ()
    match = re.fullmatch(r"(.+)\[(\d+(?:, ?\d+)*)\]", name)
    if match is None or match[1] not in problem.hyperparameters:
        raise ArgumentError(
            f'a searched name must be that of a hyperparameter, or of an entry as in "rates[0,1]"; got {name!r}. '
            f"The problem has {list(problem.hyperparameters)[:8]}."
        )
    parameter, index = problem.hyperparameters[match[1]], tuple(map(int, match[2].split(",")))
    if len(index) != parameter.ndim or any(i >= n for i, n in zip(index, parameter.shape, strict=True)):
        raise ArgumentError(
            f"a searched entry must be in its tensor; got {name!r}, and {match[1]!r} has shape "
            f"{list(parameter.shape)}."
        )
    return parameter, index


class Fresh:
    """A factory of problems that makes sure that nothing of one trial goes into the next."""

    def __init__(self, make: Callable[[], Problem]) -> None:
        self.make = make
        self.last: list[weakref.ref[nn.Module]] = []

    def __call__(self) -> Problem:
        problem = self.make()
        if not isinstance(problem, Problem):
            raise ArgumentTypeError(f"search.problem must return a br.Problem; got {type(problem).__name__}.")
        modules = [problem.model, problem.hyper]
        if any(old() is new for old, new in zip(self.last, modules, strict=False)):
            raise ArgumentError(
                "search.problem must make model and hyper anew for each trial; got those of the trial before, with "
                "what it left in them. Build them inside the function, or copy them there (copy.deepcopy)."
            )
        self.last = [weakref.ref(module) for module in modules]
        return problem
