"""Cross-validated penalties: one for all inputs, beside scikit-learn's search, and then one for each input.

scikit-learn's data on 442 patients with diabetes has ten measurements, and the progress of the illness in a year.

    pip install scikit-learn
    python examples/cross_validation.py
"""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]


def squared_error(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0])[:, 0], batch[1])


def train_loss(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    return squared_error(model, decay, batch) / 2 + decay(model)


def tuned(data: Batch, per: str) -> tuple[br.hyperparameters.WeightDecay, float]:
    model = nn.Linear(10, 1)
    decay = br.hyperparameters.WeightDecay(model, per=per, exclude=["bias"], initial=1e-4, minimum=1e-9)
    found = br.cross_validate(model, decay, train_loss, squared_error, data, folds=5)
    return decay, found.loss


def main() -> None:
    torch.set_default_dtype(torch.float64)
    x, y = load_diabetes(return_X_y=True)
    data = torch.tensor(x), torch.tensor(y)
    decay, loss = tuned(data, "global")
    print(f"one penalty: {float(decay.values()['all']):.3g}, cross-validated loss {loss:.2f}")

    # RidgeCV's penalty is that of the sum of squares: α = n · penalty, with the n examples of four folds.
    examples = len(x) * 4 / 5
    grid = {"alpha": examples * np.logspace(-8, -2, 200)}
    search = GridSearchCV(Ridge(), grid, cv=5, scoring="neg_mean_squared_error").fit(x, y)
    best = search.best_params_["alpha"] / examples
    print(f"scikit-learn: {best:.3g}, cross-validated loss {-search.best_score_:.2f}, of 200 penalties")

    decay, loss = tuned(data, "weight")
    print(f"a penalty for each of ten inputs: cross-validated loss {loss:.2f}")
    print("their penalties:", [f"{p:.1g}" for p in decay.values()["weight"][0].tolist()])


if __name__ == "__main__":
    main()
