"""The result and the cost of each method on a problem."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from .. import _tree
from .._tree import Tree
from ..curvatures import FiniteDifference
from ..errors import Error
from ..methods import SAMA, Direct, Implicit, Method, Penalty, Unrolled, hypergradient
from ..methods.rules import SGD
from ..solvers import GMRES, MINRES, ConjugateGradient, Identity, Neumann
from . import measuring
from .findings import Bench
from .spectrum import Spectrum

# With at most this many hyperparameters, more steps are affordable.
FEW = 20
FOR_FEW = "Implicit(ConjugateGradient(20, damping=None), warm_start=True)"


@dataclass(frozen=True)
class Row:
    """The results of one method.

    Attributes:
        method: its name.
        slope: its hypergradient along the direction of retraining; None if it failed, and for SAMA, whose scale is
            that of the optimiser.
        cosine: cosine with the reference, which is conjugate gradient with fifty steps.
        products: products with the curvature, in a call after the first.
        seconds, memory: cost of that call, in training gradients; None if not measured.
        said: the status of its solve, or the error message.
        failed: whether it raised an error or its solve failed.
    """

    method: str
    slope: float | None = None
    cosine: float | None = None
    products: int | None = None
    seconds: float | None = None
    memory: float | None = None
    said: str = ""
    failed: bool = False


def candidates(bench: Bench, spectrum: Spectrum, optimizer: Any = None) -> dict[str, Method]:
    """The methods that a check compares; those that need only first derivatives come last."""
    if bench.direct_only:
        return {"Direct()": Direct()}
    rate = 1.0 / spectrum.highest if spectrum.highest > 0.0 else 0.1
    sama = SAMA() if isinstance(optimizer, Optimizer) else SAMA(SGD())
    found: dict[str, Method] = {}
    if not bench.failed("second derivatives"):
        found = {"Implicit()": Implicit()}
        if _tree.size(bench.problem.hyperparameters) <= FEW:
            found[FOR_FEW] = Implicit(ConjugateGradient(20, damping=None), warm_start=True)
        if spectrum.indefinite:
            found["Implicit(MINRES(20))"] = Implicit(MINRES(20))
            found["Implicit(solvers.GMRES(20))"] = Implicit(GMRES(20))
        found |= {
            "Implicit(Neumann(20))": Implicit(Neumann(20)),
            "Implicit(Neumann(3))": Implicit(Neumann(3)),
            "Implicit(Identity())": Implicit(Identity()),
            f"Unrolled(10, {rate:.2g})": Unrolled(10, rate),
        }
    return found | {
        "Implicit(curvature=FiniteDifference())": Implicit(curvature=FiniteDifference()),
        f"Penalty(10, {rate:.2g})": Penalty(10, rate),
        "SAMA()" if sama.rule is None else "SAMA(SGD())": sama,
    }


def compare(
    bench: Bench, methods: Mapping[str, Method], optimizer: Any, direction: Tree, best: Tree
) -> list[Row]:
    """Run and time each method."""
    known = optimizer if isinstance(optimizer, Optimizer) else None
    problem = bench.problem

    def gradient() -> None:
        with problem.undisturbed(bench.seed, twice=False) as passes:
            loss = passes.train_loss(bench.train)
            torch.autograd.grad(loss, list(problem.weights.values()), allow_unused=True)

    # Profilers do not nest; ours would end the caller's.
    unit = None if torch.autograd.profiler._is_profiler_enabled else measuring.peak_bytes(gradient)
    rows = [Row("the reference", _tree.norm(best), 1.0)]
    for number, (name, method) in enumerate(methods.items(), 1):
        bench.progress(f"method {number} of {len(methods)}, {name}")
        call = partial(hypergradient, problem, bench.train, bench.val, method, bench.seed, known)
        try:
            # The first round is not timed: the first call of a warm-started method may take more steps.
            taken = measuring.seconds({"gradient": gradient, "call": call}, repeats=2)
            memory = None if unit is None else measuring.peak_bytes(call) / max(1, unit)
            h = call()
        except Error as error:
            rows.append(Row(name, said=str(error), failed=True))
            continue
        along, size = _tree.dot(h.total, direction), h.norm
        rows.append(
            Row(
                name,
                None if isinstance(method, SAMA) else along,
                along / size if 0.0 < size < math.inf else None,
                None if h.solve is None else h.solve.products,
                taken["call"] / taken["gradient"],
                memory,
                "" if h.solve is None else str(h.solve.status),
                h.solve is not None and h.solve.status.failed,
            )
        )
    return rows
