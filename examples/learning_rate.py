"""Tune a learning rate and a momentum while training: through the next ten steps, as the optimiser would make them.

What is tuned is the rate of the look-ahead. A callback hands it on to the optimiser that trains the weights.

    python examples/learning_rate.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br

Batch = tuple[Tensor, Tensor]


class Settings(nn.Module):
    """A learning rate and a momentum, in coordinates in which every value is allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.tensor(1e-3).log())
        self.logit = nn.Parameter(torch.tensor(0.0))

    def rate(self) -> Tensor:
        return self.log_rate.exp()

    def momentum(self) -> Tensor:
        return self.logit.sigmoid()


def fit(model: nn.Module, settings: Settings | None, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 2))


def with_fixed(rate: float, momentum: float, train: Batch, val: Batch, steps: int) -> float:
    """The validation loss after as many steps with fixed settings."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=momentum)
    for _ in range(steps):
        optimizer.zero_grad()
        fit(model, None, train).backward()
        optimizer.step()
    return fit(model, None, val).item()


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(2000, 10)
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).long()
    train, val = (x[:1000], y[:1000]), (x[1000:], y[1000:])
    model, settings = network(), Settings()
    weights = torch.optim.SGD(model.parameters(), settings.rate().item(), momentum=settings.momentum().item())

    def hand_on(tuner: br.Tuner) -> None:
        for group in weights.param_groups:
            group["lr"], group["momentum"] = settings.rate().item(), settings.momentum().item()

    tuner = br.Tuner(
        br.Problem(model, settings, fit, fit),
        weights,
        torch.optim.Adam(settings.parameters(), 0.1),
        br.Unrolled(10, Settings.rate, rule=br.rules.SGD(Settings.momentum)),
        weight_steps=10,
        callbacks=[hand_on],
    )
    history = tuner.fit([train], [val], hyper_steps=60)
    print(f"validation loss {history[0]['val_loss']:.3f} → {history[-1]['val_loss']:.3f}")
    print(f"learning rate {settings.rate().item():.3f}, momentum {settings.momentum().item():.3f}")
    for rate, momentum in ((1e-3, 0.5), (1e-2, 0.9), (1e-1, 0.9)):
        loss = with_fixed(rate, momentum, train, val, steps=600)
        print(f"a fixed rate of {rate:g} with momentum {momentum:g}: validation loss {loss:.3f}")


if __name__ == "__main__":
    main()
