"""Search one decay for each layer by trials: the baseline where there are few hyperparameters.

Each trial makes a new problem, with the sampler's values in it, trains it, and returns its validation loss. The
ranges are those that `WeightDecay` declares. To begin gradient descent on the decays from each trial's values, run a
`Tuner` inside ``train``.

    pip install 'bestresponse[search]' && python examples/search.py
"""

import math

import torch
from torch import Tensor, nn

import bestresponse as br
from bestresponse.hyperparameters import WeightDecay


def val_loss(model: nn.Module, decay: WeightDecay, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train_loss(model: nn.Module, decay: WeightDecay, batch: tuple[Tensor, Tensor]) -> Tensor:
    return val_loss(model, decay, batch) + decay(model)


def make_problem() -> br.Problem:
    model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 2))
    decay = WeightDecay(model, per="tensor", exclude="*.bias", minimum=1e-4, maximum=1.0, initial=1e-4)
    return br.Problem(model, decay, train_loss, val_loss)


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(260, 20)
    y = (x[:, 0] + x[:, 1] + torch.randn(260) > 0).long()  # the other inputs are irrelevant

    def train(problem: br.Problem) -> float:
        weights = list(problem.weights.values())
        optimizer = torch.optim.Adam(weights, 0.05)
        for _ in range(60):
            optimizer.zero_grad()
            problem.train_loss(problem.model, problem.hyper, (x[:60], y[:60])).backward(inputs=weights)
            optimizer.step()
        return problem.val_loss(problem.model, problem.hyper, (x[60:], y[60:])).item()

    untuned = train(make_problem())
    for sampler in ("random", "tpe"):
        best = br.search(train, problem=make_problem, sampler=sampler, trials=20)
        print(f"validation loss {untuned:.3f} → {best.loss:.3f} by {sampler}")
        print("decays:", {name: f"{math.exp(value):.2g}" for name, value in best.values.items()})


if __name__ == "__main__":
    main()
