"""What the losses must depend on: the validation loss on a weight, and one of the two on each hyperparameter."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from ..errors import EvaluationError
from ..passes import graph
from ..problem import Problem


def reaches(loss: Tensor, gradients: Iterable[Tensor | None], weights: Iterable[Tensor]) -> bool:
    """Whether a loss depends on one of the weights, even with a derivative of zero."""
    return any(g is not None for g in gradients) or not graph.leaves(loss).isdisjoint(map(id, weights))


def unreached_by_validation(problem: Problem) -> EvaluationError:
    """The error for a validation loss that depends on no weight."""
    return EvaluationError(
        f"val_loss must depend on a weight of the model; it reaches none of {list(problem.weights)[:5]}, so "
        "the indirect part would be zero. Compute it from the model that is passed in: a copy, an average of "
        "the weights (AveragedModel) or another model does not follow them. Measure these in callbacks.Evaluate. For a "
        "validation loss of the hyperparameters alone use Direct()."
    )


def refuse_unreached(
    problem: Problem, direct: Mapping[str, Tensor | None], reached_by_training: set[int]
) -> None:
    """Raise for hyperparameters that reach neither loss."""
    lost = [
        name
        for name, p in problem.hyperparameters.items()
        if direct[name] is None and id(p) not in reached_by_training
    ]
    if lost:
        asleep = "" if problem.model.training else " (The model is in eval mode, which turns dropout off.)"
        raise EvaluationError(
            f"every hyperparameter must reach train_loss or val_loss; {lost[:5]} reach neither, so their "
            "hypergradient would be zero. Use them in a loss, through the argument hyper. A learning rate or another "
            "setting of the optimiser does not move the weights' best response; tune it through the steps with "
            "Unrolled or Forward, and functions of hyper in their step_size and rule. Freeze the rest with "
            f"requires_grad_(False).{asleep}"
        )
