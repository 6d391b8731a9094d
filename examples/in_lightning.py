"""Tune decays inside Lightning's Trainer, with its precision, accumulation and clipping.

Only 5 of 40 inputs matter. Each input has a decay of its own, and the validation loss finds those to keep. The same
training without tuning is the baseline.

    pip install 'bestresponse[lightning]'
    python examples/in_lightning.py
"""

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bestresponse as br
from bestresponse.integrations import LightningTuning

INPUTS, USEFUL = 40, 5
Batch = tuple[Tensor, Tensor]


def fit(net: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(net(batch[0])[:, 0], batch[1])


def train_loss(net: nn.Module, decay: nn.Module, batch: Batch) -> Tensor:
    return fit(net, decay, batch) + decay(net)


def data(examples: int) -> TensorDataset:
    """Only five inputs matter."""
    x = torch.randn(examples, INPUTS)
    return TensorDataset(x, x[:, :USEFUL].sum(1) + torch.randn(examples))


class Regression(L.LightningModule):
    """A linear model, with a decay for each of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(INPUTS, 1)
        self.decay = br.hyperparameters.WeightDecay(self.net, per="input", exclude=["bias"])
        self.problem = br.Problem(self.net, self.decay, train_loss, fit)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        return self.problem.train_loss(self.net, self.decay, batch)

    def configure_optimizers(
        self,
    ) -> torch.optim.Optimizer:  # not self.parameters(), which has the decays too
        return torch.optim.SGD(self.problem.weights.values(), 0.05, momentum=0.9)


def train(callbacks: list[L.Callback], module: Regression, loader: DataLoader) -> None:
    trainer = L.Trainer(
        max_epochs=40,
        callbacks=callbacks,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=5.0,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


def main() -> None:
    torch.manual_seed(0)
    training, val, test = data(64), data(64), data(1000)
    loader = DataLoader(training, 16, shuffle=True)
    plain, module = Regression(), Regression()
    tuning = LightningTuning(
        module.problem,
        torch.optim.Adam(module.decay.parameters(), 0.3),
        DataLoader(val, 16, shuffle=True),
        br.Implicit(),
    )
    train([], plain, loader)
    train([tuning], module, loader)
    with torch.no_grad():
        before, after = (float(fit(m.net, m.decay, test[:])) for m in (plain, module))
    rates = module.decay.values()["weight"][0]
    print(f"loss on new data without tuning {before:.2f}, with tuned decays {after:.2f}; noise alone 1.00")
    print(
        f"mean decay of the useful inputs {rates[:USEFUL].mean():.2g}, of the others {rates[USEFUL:].mean():.2g}"
    )
    print(f"{len(tuning.history)} hyper-steps")


if __name__ == "__main__":
    main()
