"""What must be in the losses' graphs: a weight in that for validation, every hyperparameter in one of both."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from ..errors import EvaluationError
from ..passes import graph
from ..problem import Problem


def reaches(loss: Tensor, gradients: Iterable[Tensor | None], weights: Iterable[Tensor]) -> bool:
    """Whether a loss depends on one of the weights, be it with a derivative of zero."""
    return any(g is not None for g in gradients) or not graph.leaves(loss).isdisjoint(map(id, weights))


def unreached_by_validation(problem: Problem) -> EvaluationError:
    """What to raise for a validation loss that depends on no weight."""
    return EvaluationError(
        f"val_loss must depend on a weight of the model; it reaches none of {list(problem.weights)[:5]}, so that "
        "nothing would come through the weights. Compute it from the model that is passed in: a copy, an average of "
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
            f"every hyperparameter must reach train_loss or val_loss; {lost[:5]} reach neither, so that their "
            "hypergradient would be zero. Use them in a loss, through the argument hyper. A learning rate or another "
            "setting of the optimiser does not move the weights' best response, and is tuned through the steps: "
            "Unrolled or Forward, with functions of hyper in their step_size and rule. Freeze the rest with "
            f"requires_grad_(False).{asleep}"
        )
