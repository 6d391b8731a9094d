"""A hypergradient in its parts, with its report."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..errors import NotFiniteError
from ..memory import settings_of
from ..problem import Problem
from ..solvers import Report, Status
from ..solvers.blockwise import worst_of

_SHOWN = 12


@dataclass(frozen=True)
class Hypergradient:
    """dL_V/dλ, the gradient to descend, in its two parts.

    Attributes:
        total: direct + indirect, by hyperparameter.
        direct: ∂L_V/∂λ; zero if the validation loss does not depend on λ itself.
        indirect: −(A⁻¹ ∂L_V/∂w) · ∂²L_T/∂w∂λ, the part through the weights.
        val_loss: L_V at the point of the hypergradient.
        solve: the linear solve's report; None for methods without a solve.
        norms: the names of the norms whose running statistics the validation loss was differentiated through.
        verification: the result of comparing the derivatives with differences at the first call: "verified", or
            "not verified" and why; None if `Problem` was made with verify=False.
        agreement: the cosine of the hypergradients on two halves of the validation batch, from −1 to 1, and NaN if
            one is zero; of folds, the lowest of each fold's. None unless the method is `Halves`.
    """

    total: dict[str, Tensor]
    direct: dict[str, Tensor]
    indirect: dict[str, Tensor]
    val_loss: float
    solve: Report | None = None
    norms: tuple[str, ...] = ()
    verification: str | None = None
    agreement: float | None = None

    @property
    def norm(self) -> float:
        """The Euclidean norm of `total`."""
        return _tree.norm(self.total)

    def row(self) -> dict[str, Any]:
        """The validation loss, the norm and the solve's report, as numbers and texts."""
        numbers: dict[str, Any] = {"val_loss": self.val_loss, "hypergradient_norm": self.norm}
        if self.agreement is not None:
            numbers["agreement"] = self.agreement
        if self.solve is not None:
            names = (
                "products",
                "residual",
                "hypergradient_error",
                "damping_effect",
                "damping",
                "scale",
                "warm",
            )
            numbers["status"] = str(self.solve.status)
            numbers |= {name: getattr(self.solve, name) for name in names}
        return numbers

    def summary(self) -> None:
        """Print the norms of the parts, in total and by hyperparameter, and the solve's report."""
        rows: list[tuple[str, ...]] = [("", "total", "direct", "indirect")]
        names = list(self.total)
        for name in names[:_SHOWN]:
            parts = (part[name] for part in (self.total, self.direct, self.indirect))
            rows.append((name, *(f"{_tree.norm({name: x}):.4g}" for x in parts)))
        if len(names) > _SHOWN:
            rows.append((f"and {len(names) - _SHOWN} more", "", "", ""))
        whole = (f"{_tree.norm(part):.4g}" for part in (self.total, self.direct, self.indirect))
        rows.append(("all together", *whole))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print(f"Hypergradient at a validation loss of {self.val_loss:.4g}; norms:")
        for first, *rest in rows:
            cells = [x.rjust(width) for x, width in zip(rest, widths[1:], strict=True)]
            print("  ".join(["", first.ljust(widths[0]), *cells]).rstrip())
        if self.norms:
            print(f"Differentiated through the running statistics of: {', '.join(self.norms)}")
        print("No linear solve." if self.solve is None else f"Solve: {self.solve.status}")
        for name, value in () if self.solve is None else self.solve.lines():
            print(f"  {name.ljust(38)}{value}")
        if self.agreement is not None:
            print(f"Agreement of two halves of the validation batch: {self.agreement:.2f}")
        if self.verification is not None:
            print(f"Derivatives: {self.verification}")

    def __repr__(self) -> str:
        return (
            f"Hypergradient(norm={self.norm:.4g}, direct={_tree.norm(self.direct):.4g}, "
            f"indirect={_tree.norm(self.indirect):.4g}, val_loss={self.val_loss:.4g}, solve={self.solve}, "
            f"verification={self.verification!r})"
        )


def added(results: Sequence[Hypergradient]) -> Hypergradient:
    """The sum of the hypergradients of a problem's parts; its report has the worst of each number."""
    totals, directs, indirects = (
        functools.reduce(_tree.add, [getattr(r, part) for r in results])
        for part in ("total", "direct", "indirect")
    )
    solves = [r.solve for r in results if r.solve is not None]
    return Hypergradient(
        totals,
        directs,
        indirects,
        math.fsum(r.val_loss for r in results),
        worst_of(solves) if solves else None,
        tuple(dict.fromkeys(name for r in results for name in r.norms)),
        next((r.verification for r in results if r.verification is not None), None),
        min((r.agreement for r in results if r.agreement is not None), default=None),
    )


def failure_message(report: Report, indirect: Tree) -> str:
    """The message about a failed solve, and the indirect part that came of it."""
    nothing = report.residual is not None and report.residual >= 1.0 - 1e-6 and _tree.norm(indirect) == 0.0
    used = "zero is used, so the indirect part is zero" if nothing else "its best iterate is used"
    advice = "More damping, another solver or curvature, or better trained weights may help."
    if report.status is Status.NOT_FINITE and report.detail:
        advice = "Damping does not repair that derivative: add a small constant under the root, the norm or the power."
    return (
        f"the linear solve ended with {report}; {used}. {advice} "
        "(This warning comes once for each status and method; h.solve and the history report every solve.)"
    )


def skip_message(number: int, reason: str) -> str:
    """The message about the first skipped hyper-step."""
    return (
        f"hyper-step {number} is skipped: {reason}. (This warning comes once; `stepped` and `event` in the history "
        "show each skipped step. If all are skipped, use a smaller step, more damping, or another method.)"
    )


def require_finite(result: Hypergradient, when: str = "") -> None:
    """Raise if a hypergradient has NaN or infinity, and name the hyperparameters."""
    if bad := _tree.not_finite(result.total):
        why = f" ({result.solve.detail})" if result.solve is not None and result.solve.detail else ""
        raise NotFiniteError(
            f"the hypergradient must be finite; got NaN or infinity for {bad[:5]}{when}{why}. Look for sqrt, log, "
            "powers or division at zero where train_loss uses them; else use more damping or a smaller step."
        )


def warn_of_failure(problem: Problem, method: object, result: Hypergradient) -> None:
    """Warn of a failed solve, once for each status and each method with these settings."""
    if result.solve is not None and result.solve.status.failed:
        problem.warn_once(
            (result.solve.status, settings_of(method)), failure_message(result.solve, result.indirect)
        )
