"""Class weights under label shift: classes that are rare in training, and as common as the others in use.

80, 15 and 5 % of the training examples are in the three classes; in the small validation set, as in use, a third is in
each. The right weight of a class is then its share in use over its share in training (Shimodaira, 2000). Gradient
descent on the validation loss finds these weights by itself, without any knowledge of the shares.

    python examples/class_weights.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]
SHARES = (0.80, 0.15, 0.05)
CENTRES = ((0.0, 0.0), (1.5, 0.0), (0.0, 1.5))


def train_loss(model: nn.Module, weights: br.hyperparameters.Weights, batch: Batch) -> Tensor:
    return (weights(batch[1]) * F.cross_entropy(model(batch[0]), batch[1], reduction="none")).mean()


def val_loss(model: nn.Module, weights: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def draw(counts: list[int]) -> Batch:
    """So many examples of each class."""
    y = torch.arange(3).repeat_interleave(torch.tensor(counts))
    return torch.tensor(CENTRES)[y] + torch.randn(len(y), 2), y


def accuracy(model: nn.Module, batch: Batch) -> float:
    return float((model(batch[0]).argmax(1) == batch[1]).float().mean())


def main() -> None:
    torch.manual_seed(0)
    train, val, test = draw([int(2000 * s) for s in SHARES]), draw([100] * 3), draw([10_000] * 3)
    model = nn.Linear(2, 3)
    weights = br.hyperparameters.Weights(3, "softmax")  # of mean one, and equal at first
    tuner = br.Tuner(
        br.Problem(model, weights, train_loss, val_loss),
        torch.optim.SGD(model.parameters(), 0.5),
        torch.optim.Adam(weights.parameters(), 0.1),
        weight_steps=10,
        warmup_steps=200,
    )
    tuner.fit([train], [val], hyper_steps=1)
    before = accuracy(model, test)
    tuner.fit([train], [val], hyper_steps=59)

    right = torch.tensor([1.0 / share for share in SHARES])
    right *= 3.0 / right.sum()
    for name, values in (("tuned", weights.values()), ("right", right)):
        print(f"weights of the classes, {name}:", [round(w, 2) for w in values.tolist()])
    print(f"accuracy on balanced test data {100 * before:.1f} → {100 * accuracy(model, test):.1f} %")


if __name__ == "__main__":
    main()
