"""The curvature of the training loss, and how far the weights are from a place where it stands still."""

from dataclasses import dataclass

import torch

from .. import _tree
from ..curvatures import Curvature, FiniteDifference, Hessian
from ..curvatures.several_batches import linear_system
from ..solvers import MINRES, ConjugateGradient
from ..solvers.direct import dense
from .findings import Bench, Level

_DENSE = 300
_SINGULAR = 1e-6
_ILL = 1e-5
_STEPS = 30
_FAR = 0.1
_NOT_FINITE = (
    "products with the Hessian must be finite; got NaN or infinity. Look for sqrt, log or powers at zero."
)


@dataclass(frozen=True)
class Spectrum:
    """What is known of the Hessian at the present weights, on the training batch.

    Attributes:
        lowest, highest: its extreme eigenvalues; where ``whole`` is false, those that a Krylov space of 30 products
            saw: the highest to some percent, the lowest from above.
        whole: whether they are those of the dense matrix.
        smallest: the smallest size of an eigenvalue that was seen.
        gradient: ‖∂L_T/∂w‖.
        to_gain: how far a quadratic model says that the training loss could still fall on this batch.
    """

    lowest: float
    highest: float
    smallest: float
    whole: bool
    gradient: float
    to_gain: float

    @property
    def indefinite(self) -> bool:
        """Whether there is negative curvature beyond rounding."""
        return self.lowest < -_ILL * max(abs(self.lowest), abs(self.highest))


def examine(bench: Bench) -> Spectrum | None:
    """Measure curvature and stationarity; None where products are not finite."""
    problem = bench.problem
    second = bench.failed("second derivatives")
    curvature: Curvature = FiniteDifference() if second else Hessian()
    with problem.undisturbed(bench.seed, twice=curvature.twice) as passes:
        loss = passes.train_loss(bench.train)
        live = list(problem.weights.values())
        gradients = torch.autograd.grad(loss, live, allow_unused=True)
        system = linear_system(curvature, passes, bench.train)
        known = dict(zip(problem.weights, gradients, strict=True))
        g = system.responding({n: x for n in system.names if (x := known[n]) is not None})
        if _tree.size(g) <= _DENSE:
            matrix = dense(system, g)
            if not bool(torch.isfinite(matrix).all()):
                bench.say("error", "curvature", _NOT_FINITE)
                return None
            ones = {n: torch.ones_like(x) for n, x in g.items()}
            free = _tree.flatten(system.responding(ones)).bool()
            if not bool(free.any()):
                bench.say("note", "curvature", "a kink of train_loss holds all weights: none responds.")
                return None
            matrix = matrix[free][:, free]
            values = torch.linalg.eigvalsh((matrix + matrix.T) / 2)
            lowest, highest, whole = float(values[0]), float(values[-1]), True
            smallest = float(values.abs().min())
        else:
            generator = torch.Generator().manual_seed(2)
            b = {n: torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for n, x in g.items()}
            ritz = MINRES(_STEPS, tolerance=0.0).solve(system, system.responding(b)).report.curvature
            if ritz is None:
                bench.say("error", "curvature", _NOT_FINITE)
                return None
            lowest, highest, whole = *ritz, False
            smallest = min(abs(lowest), abs(highest))
        step = ConjugateGradient(20, tolerance=1e-3, damping=None).solve(system, g).x
    spectrum = Spectrum(lowest, highest, smallest, whole, _tree.norm(g), _tree.dot(g, step) / 2.0)
    _tell(bench, spectrum)
    return spectrum


def _tell(bench: Bench, spectrum: Spectrum) -> None:
    """Say what the eigenvalues mean."""
    low, high = spectrum.lowest, spectrum.highest
    seen = "eigenvalues" if spectrum.whole else f"eigenvalues seen in {_STEPS} products"
    bench.say(
        "note",
        "curvature",
        f"{seen} from {low:.3g} to {high:.3g}: a Neumann series converges for a scale below {2.0 / high:.3g}."
        if high > 0.0
        else f"{seen} from {low:.3g} to {high:.3g}.",
    )
    size = max(abs(low), abs(high))
    if spectrum.indefinite:
        bench.say(
            "warning",
            "curvature",
            "the Hessian is indefinite, so that a Neumann series diverges and undamped conjugate gradient stops. Give "
            "GaussNewton(predict, loss, rest) as the curvature where the loss is convex in the outputs; or let "
            "ConjugateGradient(damping=None) choose a damping, as Implicit() does. MINRES and GMRES solve the "
            "indefinite system as it is; its solution need not lower the validation loss.",
        )
    if spectrum.smallest <= (_SINGULAR if spectrum.whole else _ILL) * size or high <= 0.0:
        bench.say(
            "warning",
            "curvature",
            "the Hessian is singular or nearly: along some directions the training loss does not say where the "
            "weights go, and their best response is anything. Add a regulariser to train_loss, or a damping.",
        )


def tell_stationarity(bench: Bench, spectrum: Spectrum, loss: float, fallen: float | None) -> None:
    """Say how far the weights are from where the training loss stands still; by how much training lowered it."""
    said = f"‖∂L_T/∂w‖ is {spectrum.gradient:.3g}"
    gains = [fallen] if fallen is not None else []
    if not spectrum.indefinite:
        gains.append(spectrum.to_gain)
        said += (
            f"; by a quadratic model the loss of this batch, {loss:.3g}, could fall by {spectrum.to_gain:.3g}"
        )
    if fallen is not None:
        said += f"; training on this batch lowered its loss of {loss:.3g} by {fallen:.3g}"
    far = max(gains, default=0.0) > _FAR * abs(loss)
    level: Level = "warning" if far else "ok" if gains else "note"
    advice = (
        " The implicit function theorem holds where it stands still: train further first (warmup_steps), or make more "
        "weight steps for each hyper-step."
    )
    bench.say(level, "stationarity", said + "." + (advice if far else ""))
