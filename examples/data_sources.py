"""A mixture of data sources: how much to trust each of ten, from a small clean validation set.

All sources have the same linear task, each with more label noise than the one before it. For known noise, the best
weight of a source is 1 / variance (Gauss and Markov). The tuned weights know nothing of the noise.

    python examples/data_sources.py
"""

import torch
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, ...]
SOURCES, INPUTS = 10, 30


def train_loss(model: nn.Module, weights: nn.Module, batch: Batch) -> Tensor:
    x, y, source = batch
    return (weights(source) * (model(x)[:, 0] - y).square()).mean()


def val_loss(model: nn.Module, weights: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square().mean()


def weighted_least_squares(train: Batch, weights: Tensor) -> Tensor:
    x, y, source = train
    c = weights[source]
    return torch.linalg.solve(x.T @ (c[:, None] * x), x.T @ (c * y))


def main() -> None:
    torch.manual_seed(0)
    truth, noise = torch.randn(INPUTS), 0.5 + torch.arange(SOURCES)
    source = torch.arange(1000) % SOURCES
    x, x_val = torch.randn(1000, INPUTS), torch.randn(200, INPUTS)
    train = (x, x @ truth + noise[source] * torch.randn(1000), source)
    val = (x_val, x_val @ truth + 0.5 * torch.randn(200))

    model = nn.Linear(INPUTS, 1, bias=False)
    weights = br.hyperparameters.Weights(SOURCES, "softmax")  # of mean one, and equal at first
    tuner = br.Tuner(
        br.Problem(model, weights, train_loss, val_loss),
        torch.optim.SGD(model.parameters(), 0.1),
        torch.optim.Adam(weights.parameters(), 0.1),
        weight_steps=20,
        warmup_steps=100,
    )
    tuner.fit([train], [val], hyper_steps=60)

    right = noise**-2
    ways = {
        "equal weights": weighted_least_squares(train, torch.ones(SOURCES)),
        "tuned weights": model.weight[0].detach(),
        "1 / variance": weighted_least_squares(train, right),
    }
    for name, found in ways.items():  # the error on new data without noise is that of the coefficients
        print(f"error on new data, {name}: {float((found - truth).square().sum()):.3f}")
    for name, values in (("tuned", weights.values()), ("1 / variance", SOURCES * right / right.sum())):
        print(f"weights of the sources, {name}:", [round(w, 2) for w in values.tolist()])


if __name__ == "__main__":
    main()
