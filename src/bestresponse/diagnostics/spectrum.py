"""The curvature of the training loss, and the distance of the weights from a stationary point."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _tree
from ..curvatures import Curvature, FiniteDifference, Hessian
from ..curvatures.several_batches import linear_system
from ..errors import EvaluationError
from ..solvers import MINRES, ConjugateGradient
from ..solvers.direct import dense
from ..verification.probe import gradient
from .findings import Bench, Level, Obstacle
from .retraining import Retraining

_DENSE = 300
_SINGULAR = 1e-6
_ILL = 1e-5
_STEPS = 30
_FAR = 0.1
# A squared training gradient below this share of curvature times loss: a stationary point.
_AT_SADDLE = 1e-4
# A training loss below this share of the validation loss, with a singular Hessian: the model fits the batch exactly.
_FITTED = 1e-3


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of the Hessian at the present weights, and the training loss, on the training batch.

    Attributes:
        lowest, highest: extreme eigenvalues. If ``whole`` is false, they come from a Krylov space of 30 products: the
            highest is accurate to a few percent, and the lowest is an upper bound.
        whole: whether the eigenvalues are those of the dense matrix.
        smallest: the smallest absolute value of an eigenvalue.
        gradient: ‖∂L_T/∂w‖.
        loss: L_T.
        to_gain: the decrease of the training loss on this batch that a quadratic model predicts.
    """

    lowest: float
    highest: float
    smallest: float
    whole: bool
    gradient: float
    loss: float
    to_gain: float

    @property
    def singular(self) -> bool:
        """Whether an eigenvalue is zero up to rounding."""
        limit = (_SINGULAR if self.whole else _ILL) * max(abs(self.lowest), abs(self.highest))
        return self.smallest <= limit or self.highest <= 0.0

    @property
    def indefinite(self) -> bool:
        """Whether there is negative curvature beyond rounding."""
        return self.lowest < -_ILL * max(abs(self.lowest), abs(self.highest))


def examine(bench: Bench) -> Spectrum:
    """Measure curvature and stationarity.

    Raises:
        EvaluationError: the curvature is not finite, or a kink holds all weights.
    """
    bench.topic, problem = "curvature", bench.problem
    curvature: Curvature = FiniteDifference() if bench.failed("second derivatives") else Hessian()
    with problem.undisturbed(bench.seed, twice=curvature.twice) as passes:
        loss = passes.train_loss(bench.train)
        slopes = gradient(loss, problem.weights)
        system = linear_system(curvature, passes, bench.train)
        g = system.responding(system.covered(slopes))
        free = _tree.flatten(system.responding({n: torch.ones_like(x) for n, x in g.items()})).bool()
        if not bool(free.any()):
            raise EvaluationError(
                "some weights must respond; kinks of train_loss (an ℓ1 penalty) hold all of them at zero."
            )
        whole = _tree.size(g) <= _DENSE
        seen: Tensor | None
        if whole:
            matrix = dense(system, g)[free][:, free]
            finite = bool(torch.isfinite(matrix).all())
            seen = torch.linalg.eigvalsh((matrix + matrix.T) / 2) if finite else None
        else:
            generator = torch.Generator().manual_seed(2)
            b = {n: torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for n, x in g.items()}
            ritz = MINRES(_STEPS, tolerance=0.0).solve(system, system.responding(b)).report.curvature
            seen = None if ritz is None else torch.tensor(ritz, dtype=torch.float64)
        if seen is None:
            raise EvaluationError(
                "products with the Hessian must be finite; got NaN or infinity. Look for sqrt, log or powers at zero."
            )
        step = ConjugateGradient(20, tolerance=1e-3, damping=None).solve(system, g).x
    ends = float(seen[0]), float(seen[-1]), float(seen.abs().min())
    spectrum = Spectrum(*ends, whole, _tree.norm(g), float(loss.detach()), _tree.dot(g, step) / 2.0)
    _report_eigenvalues(bench, spectrum)
    return spectrum


def _report_eigenvalues(bench: Bench, spectrum: Spectrum) -> None:
    low, high = spectrum.lowest, spectrum.highest
    seen = "eigenvalues" if spectrum.whole else f"eigenvalues estimated by {_STEPS} products"
    series = f": a Neumann series converges for a scale below {2.0 / high:.3g}" if high > 0.0 else ""
    bench.add("note", f"{seen} lie between {low:.3g} and {high:.3g}{series}.")
    if spectrum.indefinite:
        bench.add(
            "warning",
            "the Hessian is indefinite: a Neumann series diverges, and undamped conjugate gradient stops. Implicit() "
            "then takes GaussNewton() if train_loss calls a loss function of torch, and damps otherwise. MINRES and "
            "GMRES solve the indefinite system, but its solution may not lower the validation loss.",
        )
    if spectrum.singular:
        bench.add(
            "warning",
            "the Hessian is singular or nearly singular: the weights have no unique best response. Add a regulariser "
            "to train_loss, or use damping.",
        )


def report_stationarity(bench: Bench, spectrum: Spectrum, retraining: Retraining | None) -> None:
    """Report the training gradient, and how far the training loss could fall or did fall in retraining."""
    bench.topic = "stationarity"
    text = f"‖∂L_T/∂w‖ is {spectrum.gradient:.3g}, and train_loss is {spectrum.loss:.3g}."
    gains, loss = [], abs(spectrum.loss)
    if spectrum.highest <= 0.0 and spectrum.gradient > 0.0:
        bench.add(
            "warning",
            f"{text} Without positive curvature, train_loss falls without bound along its gradient. Add a regulariser "
            "to train_loss.",
            Obstacle.UNBOUNDED,
        )
        return
    if not spectrum.indefinite:
        gains.append(spectrum.to_gain)
        text += f" A quadratic model predicts that train_loss can fall by {spectrum.to_gain:.3g}."
    if retraining is not None:
        gains.append(retraining.before - retraining.after)
        text += f" Retraining on this batch lowered it by {gains[-1]:.3g}."
    level: Level = "ok" if gains else "note"
    if spectrum.singular and loss <= _FITTED * abs(bench.val_loss):
        bench.add(
            "warning",
            f"the model fits this batch exactly: train_loss is {spectrum.loss:.3g}, val_loss {bench.val_loss:.3g}, and "
            "the Hessian is singular. Many weights fit equally well, so the weights have no unique best response, and "
            "training longer does not give one. Add a regulariser to train_loss.",
            Obstacle.INTERPOLATED,
        )
        return
    if (
        spectrum.lowest < -_FAR * spectrum.highest
        and spectrum.gradient**2 <= _AT_SADDLE * -spectrum.lowest * loss
    ):
        bench.add(
            "warning",
            f"{text} With negative curvature as large as {spectrum.lowest:.3g}, the weights lie at a saddle, where "
            "they have no best response. Train from other weights first.",
            Obstacle.AT_SADDLE,
        )
        return
    far = max(gains, default=0.0) > _FAR * loss
    if far:
        level = "warning"
        text += " Train longer first (warmup_steps), or make more weight steps for each hyper-step."
    bench.add(level, text, Obstacle.FAR if far else None)
