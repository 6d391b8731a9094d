"""`cross_validate` beside scikit-learn's estimators on a grid of 100 penalties, and folds batched beside in turn.

Ridge regression and lasso on diabetes (five folds of neighbouring rows), logistic regression on breast cancer
(standardised, five stratified folds), in float64. The loss is the mean over folds of the squared error or the log
loss. Ours starts from two penalties that are far from the best one. Times are CPU seconds of the fastest of the
repeats, after one call that is not counted. The second table has CPU milliseconds of the gradient of a weight step,
and of a hypergradient by ten steps of conjugate gradient, for networks with a decay for each tensor, in float32.

    python benchmarks/cross_validation.py --repeats 3 --threads 1

prints both tables.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import LassoCV, LogisticRegressionCV, RidgeCV
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import bestresponse as br
from bestresponse._layout import table

Row = dict[str, Any]


def squared_error(model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0])[:, 0], batch[1])


def penalised_squares(model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
    return squared_error(model, hyper, batch) / 2 + hyper(model)


def cross_entropy(model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])


def penalised_cross_entropy(model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, hyper, batch) + hyper(model)


def ours(
    losses: tuple[Any, Any], data: Any, splitter: Any, power: float, initial: float
) -> tuple[Any, float]:
    """The result, and the penalty exp(λ)."""
    model = nn.Linear(data[0].shape[1], 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    decay = br.hyperparameters.WeightDecay(
        model, per="global", power=power, exclude=["bias"], initial=initial, minimum=1e-9, maximum=1e3
    )
    found = br.cross_validate(model, decay, *losses, data, splitter, targets=data[1])
    return found, float(decay.log_decay.detach().exp())


def ridge(x: Any, y: Any) -> tuple[float, float]:
    found = RidgeCV(np.logspace(-4, 2, 100), cv=5, scoring="neg_mean_squared_error").fit(x, y)
    return -found.best_score_, found.alpha_ / (0.8 * len(x))


def lasso(x: Any, y: Any) -> tuple[float, float]:
    found = LassoCV(alphas=100, cv=5).fit(x, y)
    return found.mse_path_.mean(1).min(), found.alpha_


def logistic(x: Any, y: Any) -> tuple[float, float]:
    found = LogisticRegressionCV(
        Cs=np.logspace(-4, 4, 100),
        cv=StratifiedKFold(5),
        scoring="neg_log_loss",
        max_iter=1_000,
        l1_ratios=(0,),
        use_legacy_attributes=False,
    ).fit(x, y)
    return -found.scores_.mean(0).max(), 1 / (found.C_ * 0.8 * len(x))


def fastest(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """CPU seconds of the fastest call, and the last result."""
    seconds, result = [], None
    for _ in range(repeats):
        began = time.process_time()
        result = call()
        seconds.append(time.process_time() - began)
    return min(seconds), result


def beside_scikit_learn(repeats: int) -> list[Row]:
    x, y = load_diabetes(return_X_y=True)
    x_cancer, y_cancer = load_breast_cancer(return_X_y=True)
    x_cancer = StandardScaler().fit_transform(x_cancer)
    squares, entropies = (penalised_squares, squared_error), (penalised_cross_entropy, cross_entropy)
    cases = [
        ("ridge, diabetes", ridge, (x, y), squares, KFold(5), 2, (1e-1, 1e-4)),
        ("lasso, diabetes", lasso, (x, y), squares, KFold(5), 1, (1.0, 1e-3)),
        (
            "logistic, breast cancer",
            logistic,
            (x_cancer, y_cancer),
            entropies,
            StratifiedKFold(5),
            2,
            (1.0, 1e-4),
        ),
    ]
    rows = []
    for name, theirs, data, losses, splitter, power, starts in cases:
        tensors = tuple(torch.tensor(a).double() for a in data)
        theirs(*data)
        their_seconds, (best, penalty) = fastest(partial(theirs, *data), repeats)
        for start in starts:
            call = partial(ours, losses, tensors, splitter, power, start)
            call()
            seconds, (found, rate) = fastest(call, repeats)
            rows.append(
                {
                    "problem": name,
                    "start": start,
                    "loss": f"{found.loss:.6g}",
                    "best of the grid": f"{best:.6g}",
                    "worse by": f"{100 * (found.loss / best - 1):.3f} %",
                    "penalty": rate,
                    "theirs": penalty,
                    "hyper-steps": len(found.history),
                    "s": seconds,
                    "their s": their_seconds,
                }
            )
    return rows


def gradient(problem: br.Problem, batch: Any) -> Any:
    loss = problem.train_loss(problem.model, problem.hyper, batch)
    return torch.autograd.grad(loss, list(problem.weights.values()))


def batched_beside_in_turn(repeats: int) -> list[Row]:
    rows = []
    for width, examples, folds in ((16, 64, 5), (64, 64, 5), (64, 64, 20), (256, 256, 5)):
        times = {}
        for batched in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(
                nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
            )
            decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=1e-2)
            problem = br.Folds(model, decay, penalised_squares, squared_error, folds, batched=batched)
            batch = tuple((torch.randn(examples, 20), torch.randn(examples)) for _ in range(folds))
            method = br.Implicit(br.ConjugateGradient(10, tolerance=1e-30, damping=1.0))
            calls = {
                "weight step": partial(gradient, problem, batch),
                "hypergradient": partial(br.hypergradient, problem, batch, batch, method),
            }
            for name, call in calls.items():
                call()
                times[name, batched] = 1e3 * fastest(call, 5 * repeats)[0]
        row: Row = {"network": f"20-{width}-{width}-1", "examples": examples, "folds": folds}
        for name in ("weight step", "hypergradient"):
            row |= {
                f"{name}, in turn": times[name, False],
                f"{name}, batched": times[name, True],
                f"{name}, ratio": times[name, False] / times[name, True],
            }
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    print(table(beside_scikit_learn(arguments.repeats)))
    torch.set_default_dtype(torch.float32)
    print()
    print(table(batched_beside_in_turn(arguments.repeats)))


if __name__ == "__main__":
    main()
