"""Weights of several tasks' losses, inside a loop that has mixed precision and more.

One network predicts three targets. Only the first one counts, and it has few labels. The second is related to it and
helps; the third has nothing to do with it and takes the network's capacity. The loop has autocast, a GradScaler,
gradient accumulation, clipping and a schedule. Three things are new in it: the problem, `inputs=` and the hyper-step.

    python examples/loss_weights.py
"""

import torch
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TASKS, STEPS, PARTS = 3, 300, 2


class TaskWeights(nn.Module):
    """A positive weight for each task; that of the first is one."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.full((TASKS - 1,), start))

    def forward(self) -> Tensor:
        return torch.cat([self.logs.new_ones(1), self.logs.exp()])


def errors(model: nn.Module, batch: Batch) -> Tensor:
    """The mean squared error of each task; a missing label is NaN."""
    with torch.autocast(DEVICE, torch.float16):  # inside the loss, so that hypergradients run in it too
        outputs = model(batch[0])
    there = ~batch[1].isnan()
    squares = (outputs.float() - batch[1].nan_to_num()).square() * there
    return squares.sum(0) / there.sum(0).clamp(min=1)


def train_loss(model: nn.Module, weights: TaskWeights, batch: Batch) -> Tensor:
    return (weights() * errors(model, batch)).sum()


def val_loss(model: nn.Module, weights: TaskWeights, batch: Batch) -> Tensor:
    return errors(model, batch)[0]


def data(examples: int, labelled: float = 1.0) -> Batch:
    """Three targets; the first one is there for a part of the examples."""
    x = torch.randn(examples, 20)
    first = torch.sin(x[:, 0] + x[:, 1])
    targets = [first, first + 0.3 * torch.randn(examples), 3 * torch.sin(3 * x[:, 2:8]).sum(1)]
    y = torch.stack(targets, 1)
    y[torch.rand(examples) > labelled, 0] = float("nan")
    return x.to(DEVICE), y.to(DEVICE)


def train(tune: bool, first_only: bool = False) -> tuple[float, list[float]]:
    """The test loss of the first task, and the weights."""
    torch.manual_seed(0)
    batches = [data(64, labelled=0.2) for _ in range(8)]
    val, test = data(100), data(2000)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, TASKS)).to(DEVICE)
    weights = TaskWeights(-20.0 if first_only else 0.0).to(DEVICE)
    problem = br.Problem(model, weights, train_loss, val_loss)
    method, hyper_optimizer = br.Implicit(), torch.optim.Adam(weights.parameters(), 0.1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, 1e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)

    for step in range(STEPS):
        parts = [batches[(PARTS * step + part) % len(batches)] for part in range(PARTS)]
        for part in parts:
            loss = problem.train_loss(model, weights, part) / PARTS
            scaler.scale(loss).backward(inputs=list(problem.weights.values()))  # not into the task weights
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(problem.weights.values(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        if tune and step >= 50 and step % 5 == 4:
            br.backward(problem, br.Batches(parts), val, method)  # the same micro-batches, without the scaler
            hyper_optimizer.step()
            hyper_optimizer.zero_grad()
    with torch.no_grad():
        return float(val_loss(model, weights, test)), weights().tolist()


def main() -> None:
    print(f"test loss of the first task, trained alone: {train(tune=False, first_only=True)[0]:.3f}")
    print(f"test loss, equal weights: {train(tune=False)[0]:.3f}")
    loss, weights = train(tune=True)
    print(f"test loss, tuned weights: {loss:.3f}")
    print(f"weight of the related task {weights[1]:.2g}, of the unrelated one {weights[2]:.2g}")


if __name__ == "__main__":
    main()
