"""The check of a new problem, in one call."""

import math
import textwrap
import warnings
from collections.abc import Callable, Mapping
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
from .recommendation import Recommendation, recommended
from .retraining import Retraining, retrain
from .spectrum import Spectrum

_MARKS = {"ok": "ok     ", "note": "note   ", "warning": "WARNING", "error": "ERROR  "}


@dataclass(frozen=True)
class Check:
    """The result of `check`.

    Attributes:
        findings: the findings in the order of the tests.
        spectrum: curvature and stationarity; None if they could not be measured.
        retraining: the slope of the validation loss along the reference hypergradient, measured by retraining; None if
            it was skipped or failed.
        rows: the result and the cost of each method.
        recommendation: the method to start with, its cost, and what to look at.
    """

    problem: str
    findings: tuple[Finding, ...]
    spectrum: Spectrum | None
    retraining: Retraining | None
    rows: tuple[Row, ...]
    recommendation: Recommendation

    @property
    def ok(self) -> bool:
        """Whether there is no error; there may be warnings."""
        return not any(f.level == "error" for f in self.findings)

    def data(self) -> dict[str, Any]:
        """All results as plain data for JSON; a number that is not finite becomes None."""
        plain: dict[str, Any] = _finite(asdict(self))
        return plain

    def __str__(self) -> str:
        lines = [_layout.fold(self.problem), ""]
        for f in self.findings:
            lines.append(_layout.fold(f"{_MARKS[f.level]}  {f.topic}: {f.text}", " " * 9))
        if self.rows:
            lines += ["", *_table(self.rows, self.retraining)]
        said = self.recommendation
        for name, text in (("Call", said.call), ("Cost", said.cost), ("Watch", said.watch)):
            lines += [*([""] if name == "Call" else []), _layout.fold(f"{name + ':':7}{text}", " " * 7)]
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
    progress: Callable[[str], None] | None = None,
) -> Check:
    """Check whether a problem is ready for tuning, and compare the results and costs of all methods on it.

    The check examines, in this order:

    - the losses: whether they are finite, repeatable, and means over the batch;
    - a first hypergradient, with its errors and warnings and the verification of its second derivatives;
    - the gradients of both losses against differences, which finds detached tensors and edits through ``.data``;
    - the extreme eigenvalues of the curvature;
    - the hypergradient of each method against retraining, with its time and memory;
    - how stationary the weights are.

    It compares derivatives in a float64 copy if it can make one. An error ends the check. It takes about a thousand
    training gradients, half of them for retraining. Weights, hyperparameters, buffers, ``.grad``, modes, random state
    and the memory of methods stay unchanged, even after an error.

    Args:
        problem: the problem; its weights should be close to where hyper-steps will start.
        train_batch: a training batch, as large as possible.
        val_batch: a validation batch.
        weight_optimizer: the optimiser of the weights, which is then checked too.
        methods: more methods to compare, by name, such as ``{"GN": Implicit(curvature=GaussNewton())}``.
        retrain_steps: S, the steps in each of five retraining runs; 0 skips them.
        seed: seed of the random state of each pass.
        progress: a function that gets the name of each part when it starts, such as ``print``.

    Returns:
        A `Check`: print it, or use `Check.data`.

    Raises:
        ArgumentTypeError: an argument has the wrong type. Faults of the problem are findings instead.
    """
    if not isinstance(problem, Problem):
        raise ArgumentTypeError(f"problem must be a Problem; got {type(problem).__name__}.")
    require_integer("retrain_steps", retrain_steps, 0)
    require_integer("seed", seed, 0)
    for method in (methods or {}).values():
        require_method(method)
    bench = Bench(problem, train_batch, val_batch, seed)
    bench.progress = progress or bench.progress
    # One of the faults to find is a pass that edits the weights.
    with warnings.catch_warnings(), _tree.put_back(problem.live()):
        warnings.simplefilter("ignore")
        return _examined(bench, weight_optimizer, dict(methods or {}), retrain_steps)


def _examined(bench: Bench, optimizer: Any, more: dict[str, Method], steps: int) -> Check:
    """Run the tests in order, up to the first error."""
    known: Spectrum | None = None
    again: Retraining | None = None
    rows: list[Row] = []
    with bench.errors_as_findings():
        bench.copy_problem()
        if optimizer is not None:
            bench.topic = "weight optimiser"
            check_weight_optimizer(bench.problem, optimizer)
            bench.add("ok", "it has every weight, no hyperparameter and no weight decay.")
        bench.progress("the losses")
        losses.examine(bench)
        bench.progress("a first hypergradient")
        best = derivatives.reference(bench)
        bench.progress("the gradients of both losses against differences")
        derivatives.slopes(bench)
        bench.progress("the curvature")
        known = spectrum.examine(bench)
        size = _tree.norm(best)
        direction = _tree.scale(best, 1.0 / (size or 1.0))
        bench.topic = "retraining"
        if size and steps and known.highest > 0.0:
            bench.progress(f"five retraining runs of {steps} steps")
            again = retrain(bench, direction, size, known.highest, steps)
        bench.topic = "methods"
        tried = methods.candidates(bench, known, optimizer) | more if size else {}
        rows = methods.compare(bench, tried, optimizer, direction, best)
        spectrum.report_stationarity(bench, known, again)
    advice = recommended(bench, known, again, rows)
    return Check(repr(bench.problem), tuple(bench.findings), known, again, tuple(rows), advice)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(rows: tuple[Row, ...], retraining: Retraining | None) -> list[str]:
    """The table of methods, and what its columns mean."""
    unit = retraining.slope if retraining is not None and retraining.certain else None
    cells = []
    for r in rows:
        slope = {"slope": r.slope}
        if unit is not None:
            slope = {"of retraining": None if r.slope is None else r.slope / unit}
        solve = textwrap.shorten(r.said, 40, placeholder=" …")
        more = {"cosine": r.cosine, "time": r.seconds, "memory": r.memory}
        cells.append({"method": r.method} | slope | more | {"solve": solve})
    note = "slope: that of val_loss along the hypergradient of the reference."
    if retraining is not None:
        result = (
            f"retraining for {retraining.steps} steps gives, {retraining.slope:.3g} ± {retraining.error:.1g}"
        )
        if unit is None:
            note = f"{note[:-1]}; that which {result}, is too uncertain for a comparison."
        else:
            note = f"of retraining: the slope of val_loss as a share of that which {result}; 1 is best."
    note += (
        " cosine: with the hypergradient of the reference, which is conjugate gradient with 50 steps. time and memory: "
        "in those of a training gradient. solve: how it ended; steps used is usual."
    )
    return [_layout.table(cells), "", _layout.fold(note)]
