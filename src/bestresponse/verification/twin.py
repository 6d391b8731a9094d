"""A problem to experiment on: its losses on a copy of its modules in float64, and on a part of a batch."""

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .. import _tree
from ..batches import Batches, length_of, mapped, rows_of
from ..passes import graph
from ..passes.arithmetic import arithmetic
from ..problem import Passes, Problem

# The largest problem to copy: its weights and hyperparameters, and these with frozen weights and buffers.
LARGEST, LARGEST_IN_ALL = 5_000_000, 50_000_000
# Of a batch at least _ROWS examples are used, or one in _SHARE.
_ROWS, _SHARE = 8, 8
# The bytes of frozen tensors that a copy restores by value, if a pass of the problem changed none.
_ROOM = 2**20


@dataclass(frozen=True)
class Trial:
    """A problem to experiment on.

    Attributes:
        problem: the problem itself, or a copy of it.
        train, val: the batches, or a part of them.
        thing: an object that was copied too, such as a curvature with a module inside.
        seed: the seed of the random state of each pass.
        exact: whether the losses compute in float64.
    """

    problem: Problem
    train: Any
    val: Any
    thing: Any
    seed: int | None
    exact: bool


def trials(
    problem: Problem, train: Any, val: Any, thing: Any, seed: int | None, precise_first: bool = False
) -> Iterator[Trial]:
    """The trials in turn: on a part of the batch, then on all of it; the problem itself, then a float64 copy.

    A problem in float64 is used as it is. The caller must restore tensors of the problem itself.
    """
    parts = _part(train), _part(val)
    whole = parts[0] is train and parts[1] is val
    exact = all(x.dtype == torch.float64 for x in problem.live().values())
    for batches in (parts,) if whole else (parts, (train, val)):
        own = Trial(problem, *batches, thing, seed, exact)
        if not precise_first or exact:
            yield own
        copied = None if exact else _copied(own, _ROOM)
        if copied is not None:
            yield copied
            if copied.problem.edits.drifted and (copied := _copied(own, None)) is not None:
                yield copied
        if precise_first and not exact:
            yield own


def _copied(own: Trial, room: int | None) -> Trial | None:
    """`_precise`, and None for modules that do not support a copy, or float64, for any reason."""
    try:
        return _precise(own, room)
    except Exception:
        return None


def _precise(own: Trial, room: int | None) -> Trial | None:
    """A copy in float64, if it is small enough and has the same losses; for ``room`` see `Edits`."""
    problem = own.problem
    if _tree.size(problem.live()) > LARGEST or _size(problem) > LARGEST_IN_ALL:
        return None
    if any(x._backward_hooks for x in problem.live().values()):
        return None  # a copy does not have them
    plain = _pass_of(problem, own.train, own.seed)  # before there is a copy, so as not to hold both
    other, thing = twin(problem, own.thing)
    if not plain.changed_others:
        other.edits = problem.edits.with_room(room)
    train, val = doubled(own.train), doubled(own.val)
    alike = _is_alike(problem, other, (own.train, train), own.seed, plain)
    return Trial(other, train, val, thing, own.seed, True) if alike else None


def _size(problem: Problem) -> int:
    """The entries in floating point of all parameters and buffers, frozen ones included."""
    modules = nn.ModuleList([problem.model, problem.hyper])
    tensors = chain(modules.parameters(), modules.buffers())
    return sum(x.numel() for x in tensors if x.is_floating_point())


def twin(problem: Problem, thing: Any) -> tuple[Problem, Any]:
    """The same problem with its own modules, in float64, and the objects that belong to it.

    Raises whatever a copy of these modules raises.
    """
    model, hyper, thing = copy.deepcopy((problem.model, problem.hyper, thing))
    model, hyper = model.double(), hyper.double()
    other = copy.copy(problem)
    other.model, other.hyper, other._states = model, hyper, weakref.WeakKeyDictionary()
    parameters, tuned = dict(model.named_parameters()), dict(hyper.named_parameters())
    other.weights = {n: parameters[n] for n in problem.weights}
    other.hyperparameters = {n: tuned[n] for n in problem.hyperparameters}
    return other, thing


class _Pass(NamedTuple):
    """A training loss, what it reaches, and whether its passes changed tensors other than weights and buffers."""

    loss: float
    reached: set[str]
    exact: bool
    leaves: set[int]
    changed_others: bool


def _pass_of(problem: Problem, batch: Any, seed: int | None) -> _Pass:
    with problem.undisturbed(seed) as passes:
        loss = _nodes_of(passes, batch)
    leaves = graph.leaves(loss)
    reached = {n for n, x in problem.live().items() if id(x) in leaves}
    return _Pass(float(loss.detach()), reached, is_exact(loss), leaves, passes.changed_others)


def _is_alike(
    problem: Problem, other: Problem, batches: tuple[Any, Any], seed: int | None, plain: _Pass
) -> bool:
    """Whether the training loss of a copy equals the original one, uses nothing of it, and is in float64."""
    copied = _pass_of(other, batches[1], seed)
    captured = any(id(x) in copied.leaves for x in problem.live().values())
    same = plain.reached == copied.reached and not captured and copied.exact
    near = _near([plain.loss, copied.loss])
    return same and (near or _near([*_without_masks((problem, other), batches, seed)]))


def _nodes_of(passes: Passes, batch: Any) -> Tensor:
    """The training loss with the nodes of its graph, if possible without the tensors that they save."""
    try:
        with saved_tensors_hooks(lambda _: None, _dropped):
            return passes.train_loss(batch)
    except Exception:  # such as a loss with a gradient inside, which needs them
        return passes.train_loss(batch)


def _dropped(_: None) -> Tensor:
    raise RuntimeError("the tensors that this graph saves were dropped")


def _near(values: list[float]) -> bool:
    return abs(values[0] - values[1]) <= 0.05 * max(map(abs, values)) + 1e-6


def _without_masks(
    problems: tuple[Problem, Problem], batches: tuple[Any, Any], seed: int | None
) -> Iterator[float]:
    """The training losses in eval mode: the masks of dropout are other ones in another precision."""
    for problem, batch in zip(problems, batches, strict=True):
        with problem.undisturbed(seed) as passes, passes.eval_mode():
            yield float(passes.train_loss(batch).detach())


def is_exact(loss: Tensor) -> bool:
    """Whether every part of a loss computes in float64."""
    return arithmetic(loss).name == "float64"


def judged_by_its_arithmetic(trial: Trial) -> Trial:
    """The trial, marked as not exact if a part of its losses computes in less than float64."""
    with trial.problem.undisturbed(trial.seed) as passes:
        exact = is_exact(passes.train_loss(trial.train)) and is_exact(passes.val_loss(trial.val))
    return replace(trial, exact=trial.exact and exact)


def doubled(batch: Any) -> Any:
    """A batch with its floating-point tensors in float64."""
    return mapped(batch, lambda x: x.double() if x.is_floating_point() else x)


def _part(batch: Any) -> Any:
    """Evenly spaced examples of a batch, or of each of several, whose tensors have one length; else all of it."""
    if isinstance(batch, Batches):
        return Batches([_part(b) for b in batch], batch.weights, batch.recompute)
    length = length_of(batch) or 0
    rows = max(_ROWS, length // _SHARE)
    return batch if length <= rows else rows_of(batch, slice(None, rows * (length // rows), length // rows))
