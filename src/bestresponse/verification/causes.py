"""Why derivatives differ from differences: a lost path, or a training gradient that is not that of a loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import _tree
from .._tree import Tree
from ..curvatures import Curvature
from ..curvatures.several_batches import linearised
from ..errors import EvaluationError, named
from ..passes import graph
from . import suspects
from .probe import COARSE, FINE, FINE_VALUES, Differences, Line, Step, direction, gradient
from .twin import Trial

# The distance from the weights where derivatives are compared, as a share of the weights' size.
NEAR = 1e-3
# The number of tensors along which slopes of the loss are examined to find a cause.
_SLOPES = 12
_TUNED = " of hyper"
_SILENCE = "Problem(..., verify=False) leaves this comparison out."


@dataclass(frozen=True)
class Finding:
    """The result of verification.

    Attributes:
        outcome: the text for ``Hypergradient.verification``.
        text: the message of the warning or error; empty for no message.
        lost: whether a derivative is lost, so the hypergradient is invalid.
    """

    outcome: str
    text: str = ""
    lost: bool = False


def tuned(name: str) -> str:
    """A hyperparameter's name among those of weights."""
    return name + _TUNED


def is_tuned(name: str) -> bool:
    """Whether it is the name of a hyperparameter."""
    return name.endswith(_TUNED)


def together(weights: Mapping[str, Tensor], hyperparameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights and hyperparameters in one dict, by names that tell them apart."""
    return {**weights, **{tuned(n): p for n, p in hyperparameters.items()}}


def cause(trial: Trial, curvature: Curvature | None, names: Sequence[str], products: bool = True) -> Finding:
    """Why these are wrong; ``curvature`` is given if its products, or its mixed term, claim to be those of g."""
    culprits = suspects.lossy_functions(trial) or suspects.without_graph(trial)
    if culprits:
        return _lost(culprits, names)
    if names == ["A"]:
        return field(trial, names, solvable=True)
    if curvature is not None and _is_derivative_of_field(trial, curvature, products):
        of_weights = [n for n in names if not is_tuned(n)]
        return field(trial, of_weights, solvable=True) if of_weights else Finding("verified")
    tensors = together(trial.problem.weights, trial.problem.hyperparameters)
    sloped = list(names) if all(n in tensors for n in names) else list(tensors)
    if wrong_slopes(trial, "train_loss", sloped[:_SLOPES], 2):
        return field(trial, names, solvable=False)
    return _lost([], names, suspects.constants(trial) + suspects.doubled_backwards(trial))


def unclear(trial: Trial) -> Finding:
    """The result if differences do not agree with each other."""
    culprits = suspects.lossy_functions(trial)
    if culprits:
        return _lost(culprits, [])
    precision = "float64" if trial.exact else "float32"
    with trial.problem.undisturbed(trial.seed) as passes:
        loss = passes.train_loss(trial.train)
        kinks = graph.has_kinks(loss)
        again = passes.train_loss(trial.train)
    if not torch.equal(loss.detach(), again.detach()):
        return Finding(
            "not verified: train_loss is not the same in two passes",
            "train_loss must be the same in two passes from the same random state; it is not, so curvature and "
            "mixed term mix different draws. Draw from torch's own random state, or from a generator that is an "
            "attribute of a module in model or hyper; keep no counter or cache outside of them.",
        )
    why = f"kinks in {precision}" if kinks else f"differences in {precision} do not agree with each other"
    return Finding(f"not verified: {why}")


def field(trial: Trial, names: Sequence[str], solvable: bool) -> Finding:
    """The result for a training gradient that is not the gradient of a loss, which is usually intended."""
    nodes = [*suspects.functions(trial), *suspects.constants(trial)]
    where = f"its graph has {named(nodes)}" if nodes else "no function and no detached tensor was found"
    after = (
        "Its curvature is not symmetric: solvers.GMRES remains right; Exact, conjugate gradient and MINRES assume "
        "symmetry"
        if solvable
        else "Autograd's second derivatives are not those of this field, whichever solver is used; if they are "
        "intended, solvers.GMRES solves with them, symmetric or not"
    )
    return Finding(
        "not verified: the training gradient is not the gradient of a loss",
        "the training gradient is not the gradient of train_loss, as with gradient reversal, straight-through "
        f"rounding or detached weights of examples (seen in {named(names)}); {where}. {after}. If this is what you "
        f"want, Problem(..., verify=False) turns off this warning.",
    )


def _lost(culprits: Sequence[str], names: Sequence[str], places: Sequence[str] = ()) -> Finding:
    """The result for a backward pass whose own derivative is missing, wholly or partly."""
    sparse = any("Sparse" in c for c in culprits)
    if sparse:
        got = f"{named(culprits)}: torch loses that of the values of a sparse tensor"
        do = "Make the matrix dense, or add the products up with index_add"
    elif culprits:
        got = (
            f"{named(culprits)}, whose backward loses a part of it: it computes outside autograd (under no_grad, from "
            "detached tensors, in a graph of its own), or uses a value that forward saved so"
        )
        do = "Write its backward with differentiable operations on inputs and outputs that save_for_backward keeps"
    else:
        found = f": there is {named(places)}" if places else ""
        got = (
            "another one than that of differences. Look for a tensor hook, a compiled or scripted part, an edit "
            f"through .data, or a buffer that gradients should flow through{found}"
        )
        do = "Write it with twice differentiable operations"
    where = f" (seen in {named(names)})" if names else ""
    return Finding(
        "not verified: a second derivative is lost",
        "a hypergradient differentiates the training gradient once more, which requires the second derivative of "
        f"every operation in train_loss; got {got}{where}. {do}, or use Implicit(curvature=FiniteDifference()), which "
        f"needs only first derivatives. {_SILENCE}",
        True,
    )


def _is_derivative_of_field(trial: Trial, curvature: Curvature, products: bool) -> bool:
    """Whether autograd's products are derivatives of the training gradient g, whether or not g is that of a loss.

    With J = ∂g/∂w and B = ∂g/∂λ, uᵀJ v and vᵀB η are compared: autograd gives Jᵀu and Bᵀv, and differences give
    J v and B η.
    """
    problem, step = trial.problem, (FINE if trial.exact else COARSE)[0]
    weights, hyper = problem.weights, problem.hyperparameters
    u, v = (direction(weights, problem.model, number) for number in (3, 4))
    eta = direction(hyper, problem.hyper, 5)
    with problem.undisturbed(trial.seed) as passes, Line(weights, v) as base:
        base.to(NEAR)
        system = linearised(curvature, passes, trial.train)
        u, v = system.covered(u), system.covered(v)
        of_u, of_v = (system(u), system(v)) if products else (u, v)
        mixed = {n: x for n, x in system.mixed(v).items() if x is not None}
        reached = system.covered(weights)

        def agrees(claimed: float, x: Tree, tensors: Mapping[str, Tensor], along: Tree) -> bool:
            with Line(tensors, along) as line:
                differences = Differences(lambda: gradient(passes.train_loss(trial.train), reached), line)
                return _agree(claimed, lambda size: _tree.dot(x, differences.at(size)), step)

        return (
            (not products or agrees(_tree.dot(v, of_u), u, weights, v))
            and (not products or agrees(_tree.dot(u, of_v), v, weights, u))
            and agrees(sum(float((x * eta[n]).sum()) for n, x in mixed.items()), v, hyper, eta)
        )


def _agree(claimed: float, at: Callable[[float], float], step: Step) -> bool:
    """Whether a bilinear form agrees with differences."""
    fine, other = at(step.size), at(0.5 * step.size)
    return abs(claimed - fine) <= 10.0 * abs(fine - other) + step.wrong * (abs(claimed) + abs(fine))


def wrong_slopes(trial: Trial, loss: str, names: Sequence[str], number: int) -> list[str]:
    """The tensors along which a loss has a slope that differs from its gradient, at the place with this number."""
    problem, batch = trial.problem, trial.val if loss == "val_loss" else trial.train
    tensors = together(problem.weights, problem.hyperparameters)
    steps = FINE_VALUES if trial.exact else [replace(step, right=1e-2, wrong=5e-2) for step in COARSE]
    aside = direction(problem.weights, problem.model, number)
    wrong = []
    with problem.undisturbed(trial.seed) as passes, Line(problem.weights, aside) as base:
        base.to(NEAR)
        g = gradient(getattr(passes, loss)(batch), tensors)
        if not any(bool(x.any()) for x in g.values()):  # a loss that reads the original and not this copy
            raise EvaluationError(f"{loss} must depend on a weight; it reaches none of this problem's.")
        like = torch.float64 if trial.exact else torch.float32

        def values() -> Tree:
            return {"loss": torch.tensor([float(getattr(passes, loss)(batch).detach())], dtype=like)}

        for name in names:
            along = direction({name: tensors[name]}, problem.model, number + 4)
            along[name] += g[name] * (_tree.norm(along) / (float(g[name].norm()) or 1.0))
            claimed = {"loss": torch.tensor([float((along[name] * g[name]).sum())], dtype=like)}
            with Line(tensors, along) as line:
                if Differences(values, line).judge(claimed, [["loss"]], steps).kind == "wrong":
                    wrong.append(name)
    return wrong
