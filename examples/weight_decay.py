"""A weight decay for each tensor, tuned inside an existing training loop.

Lines that end in # + are new in the loop. The results stand beside those of one fixed decay for all tensors.

    python examples/weight_decay.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bestresponse as br

Batch = tuple[Tensor, Tensor]


def fit(model: nn.Module, decay: nn.Module | None, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train_loss(model: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:  # +
    return fit(model, decay, batch) + decay(model)  # +


def train(data: TensorDataset, val: Batch, tune: bool, initial: float) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 2))
    loader = DataLoader(data, 32, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=initial)  # +
    problem = br.Problem(model, decay, train_loss, fit)  # +
    hyper_optimizer = torch.optim.Adam(decay.parameters(), 0.1)  # +
    method = br.Implicit()  # once, before the loop: it keeps its last solution  # +

    for _ in range(100):
        for batch in loader:
            optimizer.zero_grad()
            loss = train_loss(model, decay, batch)
            loss.backward(inputs=list(problem.weights.values()))  # inputs: not into the decays  # +
            optimizer.step()
        if tune:  # +
            hyper_optimizer.zero_grad()  # +
            br.backward(problem, batch, val, method)  # adds dL_V/dλ to .grad  # +
            hyper_optimizer.step()  # +
            decay.project_()  # back into its bounds  # +
    return model, decay


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(3296, 30)
    y = (x[:, :3].sum(1) + torch.randn(3296) > 0).long()
    data, val, test = TensorDataset(x[:96], y[:96]), (x[96:296], y[96:296]), (x[296:], y[296:])
    for initial in (1e-4, 1e-3, 1e-2, 1e-1):
        model, _ = train(data, val, tune=False, initial=initial)
        print(f"one decay of {initial:g}: test loss {float(fit(model, None, test).detach()):.3f}")
    model, decay = train(data, val, tune=True, initial=1e-3)
    print(f"tuned decays: test loss {float(fit(model, None, test).detach()):.3f}")
    print({name: f"{float(value):.2g}" for name, value in decay.values().items()})


if __name__ == "__main__":
    main()
