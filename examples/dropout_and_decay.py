"""Tune two dropout rates inside a network and a weight decay for each of its tensors, together.

Modules with rates run as layers of the model. They go, with whatever else is tuned, into one submodule of the model,
which is given as ``hyper``; their rates are then no weights.

    python examples/dropout_and_decay.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]


class Network(nn.Module):
    """Two layers, each behind a dropout of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 64), nn.Linear(64, 2)
        # What is tuned, in one submodule: two rates, and then the decays, by the names of the weights.
        self.tuned = nn.ModuleDict(
            {
                "inputs": br.hyperparameters.ConcreteDropout(initial=0.2),
                "hidden": br.hyperparameters.ConcreteDropout(initial=0.2),
            }
        )
        self.tuned["decay"] = br.hyperparameters.WeightDecay(
            self, per="tensor", initial=1e-3, exclude=["tuned.*"]
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(self.tuned["inputs"](x)))
        outputs: Tensor = self.last(self.tuned["hidden"](h))
        return outputs


def train_loss(model: Network, tuned: nn.ModuleDict, batch: Batch) -> Tensor:
    penalty: Tensor = tuned["decay"](model)
    return F.cross_entropy(model(batch[0]), batch[1]) + penalty


def val_loss(model: Network, tuned: nn.ModuleDict, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def draw() -> tuple[Batch, Batch, Batch]:
    """Training, validation and test examples."""
    torch.manual_seed(0)
    x = torch.randn(1200, 20)
    y = (x[:, 0] + x[:, 1] * x[:, 2] + 0.5 * torch.randn(1200) > 0).long()
    train, val, test = ((x[a:b], y[a:b]) for a, b in ((0, 100), (100, 600), (600, 1200)))
    return train, val, test


def make_problem() -> tuple[br.Problem, Batch, Batch, torch.optim.Optimizer]:
    """For ``bestresponse check examples.dropout_and_decay:make_problem``: the problem before the first step."""
    train, val, _ = draw()
    model = Network()
    problem = br.Problem(model, model.tuned, train_loss, val_loss)
    return problem, train, val, torch.optim.Adam(problem.weights.values(), 1e-2)


def main() -> None:
    problem, train, val, optimizer = make_problem()
    model, test = problem.model, draw()[2]
    # With dropout: few steps, and a damping set by hand.
    method = br.Implicit(
        br.ConjugateGradient(2, damping=0.1),
        br.GaussNewton(),
        warm_start=True,
    )
    tuner = br.Tuner(
        problem,
        optimizer,
        torch.optim.Adam(problem.hyperparameters.values(), 3e-2),
        method,
        weight_steps=5,
        warmup_steps=50,
    )
    history = tuner.fit([train], [val], hyper_steps=120)
    model.eval()
    with torch.no_grad():
        loss = float(val_loss(model, model.tuned, test))
    for name in ("inputs", "hidden"):
        print(f"dropout of {name}: {float(model.tuned[name].rates()):.2f}")
    for name, decay in model.tuned["decay"].values().items():
        print(f"decay of {name}: {float(decay):.2g}")
    print(
        f"validation loss {history[0]['val_loss']:.3f} → {history[-1]['val_loss']:.3f}; test loss {loss:.3f}"
    )


if __name__ == "__main__":
    main()
