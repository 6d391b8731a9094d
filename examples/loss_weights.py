"""Tune the weight of each data source with a module of hyperparameters of your own.

Ten sources give the same linear task with ever more label noise; the validation data is clean. Gradient descent on
the validation loss finds by itself which sources to trust.

    python examples/loss_weights.py
"""

import torch
from torch import Tensor, nn

import bestresponse as br

SOURCES = 10


class SourceWeights(nn.Module):
    """A weight for each source, positive and of mean one."""

    def __init__(self, sources: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(sources))

    def forward(self) -> Tensor:
        return len(self.logits) * self.logits.softmax(dim=0)


def train_loss(model: nn.Module, hyper: SourceWeights, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    x, y, source = batch
    each = (model(x)[:, 0] - y).square()
    return (hyper()[source] * each).mean()


def val_loss(model: nn.Module, hyper: SourceWeights, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square().mean()


def main() -> None:
    torch.manual_seed(0)
    truth = torch.randn(30)
    x = torch.randn(400, 30)
    source = torch.arange(400) % SOURCES
    train = (x, x @ truth + 0.5 * source * torch.randn(400), source)
    x_val = torch.randn(200, 30)
    val = (x_val, x_val @ truth)

    model, hyper = nn.Linear(30, 1), SourceWeights(SOURCES)
    problem = br.Problem(model, hyper, train_loss, val_loss)
    tuner = br.Tuner(
        problem,
        torch.optim.SGD(problem.weights.values(), 0.02),
        torch.optim.Adam(problem.hyperparameters.values(), 0.05),
        br.Implicit(),
        weight_steps=10,
        warmup_steps=100,
    )
    history = tuner.fit([train], [val], hyper_steps=150)
    print(f"validation loss {history[0]['val_loss']:.3f} → {history[-1]['val_loss']:.3f}")
    print("weights of the sources, the cleanest first:", [round(w, 2) for w in hyper().tolist()])


if __name__ == "__main__":
    main()
