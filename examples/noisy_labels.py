"""Wrong labels: a small network of the loss learns which examples to leave out, from a few right labels.

Half of 400 training labels are random; 60 more labels are known to be right. `LossWeights` weighs each training example
by a function of its own loss, and this function is tuned.

    python examples/noisy_labels.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]
INPUTS, CLASSES, DECAY = 30, 4, 0.02


def each_loss(model: nn.Linear, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train_loss(model: nn.Linear, weights: br.hyperparameters.LossWeights, batch: Batch) -> Tensor:
    return weights(each_loss(model, batch)).mean() + DECAY / 2 * model.weight.square().sum()


def val_loss(model: nn.Linear, weights: nn.Module, batch: Batch) -> Tensor:
    return each_loss(model, batch).mean()


def accuracy(model: nn.Linear, batch: Batch) -> float:
    return 100 * float((model(batch[0]).argmax(1) == batch[1]).float().mean())


def trained_on(batch: Batch) -> nn.Linear:
    """A model that is trained without weights."""
    model = nn.Linear(INPUTS, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    for _ in range(200):
        optimizer.zero_grad()
        train_loss(model, lambda losses: losses, batch).backward()
        optimizer.step()
    return model


def main() -> None:
    torch.manual_seed(0)
    centres, labels = torch.randn(CLASSES, INPUTS), torch.randint(CLASSES, (4460,))
    x = centres[labels] + 2.0 * torch.randn(4460, INPUTS)
    given = torch.where(torch.rand(400) < 0.5, torch.randint(CLASSES, (400,)), labels[:400])
    wrong = given != labels[:400]
    train, val, test = (x[:400], given), (x[400:460], labels[400:460]), (x[460:], labels[460:])

    model = nn.Linear(INPUTS, CLASSES)
    weights = br.hyperparameters.LossWeights(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    tuner = br.Tuner(
        br.Problem(model, weights, train_loss, val_loss),
        torch.optim.SGD(model.parameters(), 0.2, momentum=0.9),
        torch.optim.Adam(weights.parameters(), 0.05),
        weight_steps=10,
        warmup_steps=50,
    )
    tuner.fit([train], [val], hyper_steps=60)

    found = weights.weights(each_loss(model, train))
    print(
        f"mean weight of right labels {found[~wrong].mean():.2f}, of wrong labels {found[wrong].mean():.2f}"
    )
    both = torch.cat([x[:400][~wrong], val[0]]), torch.cat([given[~wrong], val[1]])
    print(f"test accuracy, all labels: {accuracy(trained_on(train), test):.1f} %")
    print(f"test accuracy, the 60 right labels: {accuracy(trained_on(val), test):.1f} %")
    print(f"test accuracy, tuned weights: {accuracy(model, test):.1f} %")
    print(f"test accuracy, if the wrong labels were known: {accuracy(trained_on(both), test):.1f} %")


if __name__ == "__main__":
    main()
