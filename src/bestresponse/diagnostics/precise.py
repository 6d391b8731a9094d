"""A copy of a problem, where one can be made, whose tensors may be moved; in float64 rounding does not hide faults."""

import copy
from typing import Any

import torch

from .. import _graph
from ..problem import Problem
from .findings import Bench, mapped, tensors_of

_LARGEST = 5_000_000


def copied(bench: Bench, double: bool) -> Bench:
    """The same problem in modules of its own, in float64 if wanted; the bench itself where there is no copy.

    A copy counts where its losses are those of the problem, and reach the same weights and hyperparameters: functions
    that hold modules of their own, or make tensors of a fixed dtype, have none.
    """
    problem = bench.problem
    if sum(x.numel() for x in (*problem.weights.values(), *problem.hyperparameters.values())) > _LARGEST:
        return bench
    try:
        model, hyper = copy.deepcopy((problem.model, problem.hyper))
        if double:
            model, hyper = model.double(), hyper.double()
        twin = Problem(model, hyper, problem.train_loss, problem.val_loss, problem.val_mode)
        train, val = (_double(b) if double else b for b in (bench.train, bench.val))
        other = Bench(twin, train, val, bench.seed, bench.findings)
        alike = all(_alike(bench, other, name, double) for name in ("train_loss", "val_loss"))
    except Exception:  # a problem that has no such copy, for whatever reason
        return bench
    return other if alike else bench


def _double(batch: Any) -> Any:
    return mapped(batch, lambda x: x.double() if x.is_floating_point() else x)


def _alike(bench: Bench, other: Bench, name: str, double: bool) -> bool:
    """Whether a loss of a copy is that of the original, and uses nothing of it."""
    values, reached = [], []
    for one in (bench, other):
        problem = one.problem
        with problem.undisturbed(one.seed) as passes:
            loss = getattr(passes, name)(one.train if name == "train_loss" else one.val)
        leaves = _graph.leaves(loss)
        values.append(float(loss.detach()))
        reached.append({n for n, x in tensors_of(problem).items() if id(x) in leaves})
    captured = any(id(x) in leaves for x in tensors_of(bench.problem).values())
    near = abs(values[0] - values[1]) <= 0.05 * max(map(abs, values)) + 1e-6
    same = near and reached[0] == reached[1] and not captured
    return same and (loss.dtype == torch.float64 or not double)
