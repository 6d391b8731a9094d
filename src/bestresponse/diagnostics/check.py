"""One call for a new problem."""

import math
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .. import _tree
from .._tree import Tree
from ..errors import ArgumentTypeError, require_integer
from ..methods import Method
from ..methods.base import require_method
from ..problem import Problem
from ..verification.twin import tensors_of
from . import derivatives, losses, methods, spectrum
from .findings import Bench, Finding
from .methods import Row
from .precise import copied
from .retraining import Retraining, retrain
from .spectrum import Spectrum

_CLOSE = 0.2
# Cosines with the reference that are no further apart are alike.
_NEAR = 0.02
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
        lines = [self.problem, ""]
        for f in self.findings:
            head = f"{_MARKS[f.level]}  {f.topic}: "
            lines.append(
                textwrap.fill(
                    f.text, 110, initial_indent=head, subsequent_indent=" " * 9, break_on_hyphens=False
                )
            )
        if self.rows:
            lines += ["", *_table(self.rows, self.retraining)]
        lines += ["", textwrap.fill("To begin with: " + self.recommendation, 110, break_on_hyphens=False)]
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

    It looks at: values, dependence and repeatability of the losses, by name; whether they are means; gradients, one
    product with the Hessian and one mixed term against differences (which finds detached tensors and edits through
    ``.data``), in a float64 copy where one can be made; the curvature's extreme eigenvalues; how stationary the weights
    are; each method's hypergradient against training again, its time and memory. About a thousand training
    gradients in all, half of them for the re-training. Weights, hyperparameters, buffers, ``.grad``, modes, random
    state and what methods remember are as before, also after an error.

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bench = Bench(problem, train_batch, val_batch, seed, [])
        with bench.errors_told("parameters"):
            problem.check_intact()
            # A twin of its own, so that what is remembered and warned of stays as it is.
            twin = Problem(
                problem.model,
                problem.hyper,
                problem.train_loss,
                problem.val_loss,
                problem.val_mode,
                verify=False,
            )
        if bench.failed("parameters"):
            return Check(repr(problem), tuple(bench.findings), None, None, (), _advice(bench, None, None, []))
        bench.problem = twin
        tensors = tensors_of(twin)
        kept = _tree.copy(tensors)
        try:
            return _examined(bench, weight_optimizer, dict(methods or {}), retrain_steps)
        finally:  # a pass may edit its weights, which is one of the faults
            losses.restore(tensors, kept)


def _examined(bench: Bench, optimizer: Any, more: dict[str, Method], steps: int) -> Check:
    losses.examine(bench, optimizer)
    known: Spectrum | None = None
    retraining: Retraining | None = None
    rows: list[Row] = []
    if not bench.failed("losses"):
        with bench.errors_told("derivatives"):
            derivatives.examine(copied(bench, double=True))
    if not (bench.failed("losses") or bench.failed("derivatives")):
        with bench.errors_told("curvature"):
            known = spectrum.examine(bench)
    if known is not None and not bench.failed("hyperparameters"):
        with bench.errors_told("hypergradient"):
            retraining, rows = _compared(bench, known, optimizer, more, steps)
    if known is not None:
        loss = retraining.before if retraining is not None else _train_loss(bench)
        fallen = None if retraining is None else retraining.before - retraining.after
        spectrum.tell_stationarity(bench, known, loss, fallen)
    advice = _advice(bench, known, retraining, rows)
    return Check(repr(bench.problem), tuple(bench.findings), known, retraining, tuple(rows), advice)


def _compared(
    bench: Bench, known: Spectrum, optimizer: Any, more: dict[str, Method], steps: int
) -> tuple[Retraining | None, list[Row]]:
    """Training again along the reference hypergradient, and what each method says of it."""
    best = methods.reference(bench)
    size = _tree.norm(best)
    if not 0.0 < size < math.inf:
        bench.say(
            "warning", "hypergradient", "it is zero: the validation loss does not see the hyperparameters."
        )
        return None, []
    direction: Tree = _tree.scale(best, 1.0 / size)
    retraining = None
    if steps and known.highest > 0.0:
        retraining = retrain(copied(bench, double=False), direction, size, known.highest, steps)
    tried = methods.candidates(bench, known, optimizer) | more
    return retraining, methods.compare(bench, tried, optimizer, direction, best)


def _train_loss(bench: Bench) -> float:
    with bench.problem.undisturbed(bench.seed, twice=False) as passes:
        return float(passes.train_loss(bench.train).detach())


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _advice(bench: Bench, known: Spectrum | None, retraining: Retraining | None, rows: list[Row]) -> str:
    wrong = [f.topic for f in bench.findings if f.level == "error" and f.topic != "second derivatives"]
    if wrong or known is None:
        return f"mend what is said of {', '.join(dict.fromkeys(wrong)) or 'the curvature'}, and check again."
    if bench.direct_only:
        return "Direct(), since nothing comes through the weights."
    if bench.failed("second derivatives"):
        text = (
            "the way out that the error names, for exact hypergradients; else Implicit(curvature=FiniteDifference()) "
            "on smooth networks, or Penalty(steps, step_size)."
        )
    else:
        text = _start_with(bench, rows)
        if known.lowest < 0.0:
            text += "; where the loss splits, with curvature=GaussNewton(predict, loss, rest)"
        if any(type(m).__name__.startswith("Dropout") and m.training for m in bench.problem.model.modules()):
            text += "; with dropout and small batches, ConjugateGradient(2, damping=0.1)"
        if any(f.topic == "stationarity" and f.level == "warning" for f in bench.findings):
            text += "; and more training before the first hyper-step"
        text += "."
    return text + _closest(retraining, rows)


def _start_with(bench: Bench, rows: list[Row]) -> str:
    """The method that we recommend for so many hyperparameters, or another where the table shows that it fails."""
    first = methods.FOR_FEW if _tree.size(bench.problem.hyperparameters) <= methods.FEW else "Implicit()"
    failed = {r.method for r in rows if r.failed}
    if first not in failed:
        return f"{first}, made once before the loop"
    others = [r for r in rows if not r.failed and r.cosine is not None and r.seconds is not None]
    if not others:
        return "no method of the table, since each fails: train further, or add a regulariser to train_loss"
    best = max(r.cosine or -1.0 for r in others)
    near = [r for r in others if (r.cosine or -1.0) >= best - _NEAR]
    plain = [r for r in near if r.method == "Implicit()"]
    chosen = plain[0] if plain else min(near, key=lambda r: r.seconds or math.inf)
    return f"{chosen.method}, since {first} fails here: its solve ends with {_said(rows, first)}"


def _said(rows: list[Row], method: str) -> str:
    return next(r.said for r in rows if r.method == method)


def _closest(retraining: Retraining | None, rows: list[Row]) -> str:
    """Which of the compared methods is near the re-training at the lowest price."""
    ran = [r for r in rows if r.slope is not None and r.seconds is not None and not r.failed]
    if retraining is None or not ran or abs(retraining.slope) <= 5.0 * retraining.error:
        return ""
    ratios = {r.method: (r.slope or 0.0) / retraining.slope for r in ran}
    near = [r for r in ran if abs(ratios[r.method] - 1.0) <= _CLOSE]
    if near:
        cheapest = min(near, key=lambda r: r.seconds or math.inf)
        return (
            f" In a single call on this batch {cheapest.method} is within {_CLOSE:.0%} of training again, at "
            f"{cheapest.seconds:.1f} training gradients. Methods that start warm come nearer along a run."
        )
    nearest = min(ran, key=lambda r: abs(ratios[r.method] - 1.0))
    if not 0.5 <= ratios[nearest.method] <= 2.0:
        return (
            f" In a single call on this batch no method predicts what {retraining.steps} steps of training again give: "
            "train further (warmup_steps), and check again."
        )
    return (
        f" In a single call on this batch no method is within {_CLOSE:.0%} of {retraining.steps} steps of training "
        f"again; the nearest is {nearest.method}, {ratios[nearest.method]:.2f} times it. Methods that start warm come "
        "nearer "
        "along a run."
    )


def _table(rows: tuple[Row, ...], retraining: Retraining | None) -> list[str]:
    head = ("method", "slope", "of re-training", "cosine", "products", "time", "memory", "solve")
    cells: list[tuple[str, ...]] = [head]
    for r in rows:
        share = (
            ""
            if retraining is None or r.slope is None or not retraining.slope
            else r.slope / retraining.slope
        )
        cells.append(
            (
                r.method,
                *(_short(x) for x in (r.slope, share, r.cosine, r.products, r.seconds, r.memory)),
                textwrap.shorten(r.said, 40, placeholder=" …"),
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *middle, last in cells:
        numbers = [x.rjust(w) for x, w in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *numbers, last]).rstrip())
    note = (
        "Slope: along the reference hypergradient (conjugate gradient, 50 steps). Time and memory in training "
        "gradients."
    )
    if retraining is not None:
        note += (
            f" Training again for {retraining.steps} steps: {retraining.slope:.4g} ± {retraining.error:.1g}."
        )
    return [*lines, textwrap.fill(note, 110, break_on_hyphens=False)]


def _short(x: Any) -> str:
    return "" if x is None or x == "" else str(x) if isinstance(x, int) else f"{x:.3g}"
