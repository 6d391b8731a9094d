"""One call for a new problem."""

import math
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .. import _layout, _tree
from ..errors import ArgumentTypeError, require_integer
from ..methods import Method
from ..methods.base import require_method
from ..problem import Problem
from ..runs.requirements import check_weight_optimizer
from . import derivatives, losses, methods, spectrum
from .findings import Bench, Finding
from .methods import Row
from .recommendation import recommended
from .retraining import Retraining, retrain
from .spectrum import Spectrum

_MARKS = {"ok": "ok     ", "note": "note   ", "warning": "WARNING", "error": "ERROR  "}


@dataclass(frozen=True)
class Check:
    """What `check` found.

    Attributes:
        findings: sentence by sentence, in the order of the tests.
        spectrum: curvature and stationarity; None where no product could be made.
        retraining: the slope of the validation loss along the reference hypergradient, by training again; None where
            it was left out or failed.
        rows: what each method gives and costs.
        recommendation: which method to begin with.
    """

    problem: str
    findings: tuple[Finding, ...]
    spectrum: Spectrum | None
    retraining: Retraining | None
    rows: tuple[Row, ...]
    recommendation: str

    @property
    def ok(self) -> bool:
        """Whether there is no error; warnings may stand."""
        return not any(f.level == "error" for f in self.findings)

    def data(self) -> dict[str, Any]:
        """Everything as plain data, for JSON: a number that is not finite is None."""
        plain: dict[str, Any] = _finite(asdict(self))
        return plain

    def __str__(self) -> str:
        lines = [_layout.fold(self.problem), ""]
        for f in self.findings:
            lines.append(_layout.fold(f"{_MARKS[f.level]}  {f.topic}: {f.text}", " " * 9))
        if self.rows:
            lines += ["", *_table(self.rows, self.retraining)]
        lines += ["", _layout.fold("To begin with: " + self.recommendation)]
        return "\n".join(lines)


def check(
    problem: Problem,
    train_batch: Any,
    val_batch: Any,
    *,
    weight_optimizer: Any = None,
    methods: Mapping[str, Method] | None = None,
    retrain_steps: int = 100,
    seed: int = 0,
) -> Check:
    """Is a problem ready to be tuned, which method suits it, and what does it cost?

    It looks in turn at: the values of the losses, whether they repeat, and whether they are means; a first
    hypergradient, with its errors and warnings and the verification of its second derivatives; the gradients of both
    losses against differences (which finds detached tensors and edits through ``.data``); the curvature's extreme
    eigenvalues; how stationary the weights are; each method's hypergradient against training again, its time and
    memory. Derivatives are compared in a float64 copy where one can be made. An error ends the check. It takes about a
    thousand training gradients, half of them for the re-training. Weights, hyperparameters, buffers, ``.grad``, modes,
    random state and what methods remember are as before, also after an error.

    Args:
        problem: the problem; its weights should be about where hyper-steps will begin.
        train_batch: a training batch, as large as may be.
        val_batch: a validation batch.
        weight_optimizer: what trains the weights, which is then looked at too.
        methods: more methods to compare, by name, such as ``{"GN": Implicit(curvature=GaussNewton(...))}``.
        retrain_steps: S steps of each of five re-trainings; zero leaves them out.
        seed: of the random state of each pass.

    Returns:
        A `Check`: print it, or take its `Check.data`.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind. What is wrong with the problem is a finding.
    """
    if not isinstance(problem, Problem):
        raise ArgumentTypeError(f"problem must be a Problem; got {type(problem).__name__}.")
    require_integer("retrain_steps", retrain_steps, 0)
    require_integer("seed", seed, 0)
    for method in (methods or {}).values():
        require_method(method)
    bench = Bench(problem, train_batch, val_batch, seed)
    # A pass may edit the weights, which is one of the faults.
    with warnings.catch_warnings(), _tree.put_back(problem.live()):
        warnings.simplefilter("ignore")
        return _examined(bench, weight_optimizer, dict(methods or {}), retrain_steps)


def _examined(bench: Bench, optimizer: Any, more: dict[str, Method], steps: int) -> Check:
    """Each test in turn, up to the first error."""
    known: Spectrum | None = None
    again: Retraining | None = None
    rows: list[Row] = []
    with bench.errors_told():
        bench.leave_the_callers()
        if optimizer is not None:
            bench.topic = "weight optimiser"
            check_weight_optimizer(bench.problem, optimizer)
            bench.say("ok", "it holds every weight, no hyperparameter, and no decay.")
        losses.examine(bench)
        best = derivatives.reference(bench)
        derivatives.slopes(bench)
        known = spectrum.examine(bench)
        size = _tree.norm(best)
        direction = _tree.scale(best, 1.0 / (size or 1.0))
        bench.topic = "re-training"
        if size and steps and known.highest > 0.0:
            again = retrain(bench, direction, size, known.highest, steps)
        bench.topic = "methods"
        tried = methods.candidates(bench, known, optimizer) | more if size else {}
        rows = methods.compare(bench, tried, optimizer, direction, best)
        spectrum.tell_stationarity(bench, known, again)
    advice = recommended(bench, known, again, rows)
    return Check(repr(bench.problem), tuple(bench.findings), known, again, tuple(rows), advice)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(rows: tuple[Row, ...], retraining: Retraining | None) -> list[str]:
    slope = retraining.slope if retraining is not None else None
    cells = [
        {
            "method": r.method,
            "slope": r.slope,
            "of re-training": r.slope / slope if slope and r.slope is not None else None,
            "cosine": r.cosine,
            "products": r.products,
            "time": r.seconds,
            "memory": r.memory,
            "solve": textwrap.shorten(r.said, 40, placeholder=" …"),
        }
        for r in rows
    ]
    note = (
        "Slope: along the reference hypergradient (conjugate gradient, 50 steps). Time and memory in training "
        "gradients."
    )
    if retraining is not None:
        note += (
            f" Training again for {retraining.steps} steps: {retraining.slope:.4g} ± {retraining.error:.1g}."
        )
    return [_layout.table(cells), "", _layout.fold(note)]
