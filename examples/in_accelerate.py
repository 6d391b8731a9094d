"""Tune decays inside a loop of Hugging Face's accelerate, with its precision, accumulation, clipping and checkpoints.

Only 5 of 40 inputs matter. Each input has a decay of its own, and the validation loss finds those to keep.

    pip install 'bestresponse[accelerate]'
    python examples/in_accelerate.py
"""

import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import bestresponse as br
from bestresponse.integrations import Tuning

INPUTS, USEFUL, EPOCHS, BATCH = 40, 5, 60, 16

Batch = tuple[Tensor, Tensor]


def fit(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0])[:, 0], batch[1])


def train_loss(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
    return fit(model, hyper, batch) + hyper(model)


def data(examples: int) -> TensorDataset:
    x = torch.randn(examples, INPUTS)
    return TensorDataset(x, x[:, :USEFUL].sum(1) + torch.randn(examples))


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    train, val, test = data(64), data(64), data(1000)
    network = nn.Linear(INPUTS, 1)
    loader = DataLoader(train, BATCH, shuffle=True)
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    model, prepared, loader = accelerator.prepare(network, optimizer, loader)

    decay = br.hyperparameters.WeightDecay(model, per="input", exclude=["bias"]).to(accelerator.device)
    problem = br.Problem(model, decay, train_loss, fit)
    # The hyper-optimiser is not prepared: accelerate would skip its steps, or scale its gradients.
    hyper_optimizer = torch.optim.Adam(decay.parameters(), 0.3)
    tuner = br.Tuner(problem, optimizer, hyper_optimizer, br.Implicit())
    # The validation loader is not prepared either: accelerate's accumulation would follow it.
    tuning = Tuning(
        tuner,
        DataLoader(val, BATCH, shuffle=True),
        steps=EPOCHS * len(loader) // 2,
        place=lambda batch: send_to_device(batch, accelerator.device),
    )
    accelerator.register_for_checkpointing(tuning)  # save_state and load_state include it

    with tuning:
        for _ in range(EPOCHS):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = problem.train_loss(model, decay, batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 5.0)
                    prepared.step()
                    prepared.zero_grad()
                tuning.after_batch(batch, loss, stepped=accelerator.sync_gradients)

    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        before = [p.clone() for p in decay.parameters()]
        nn.init.zeros_(decay.log_decay.weight)
        accelerator.load_state(folder)
        same = all(torch.equal(p, q) for p, q in zip(decay.parameters(), before, strict=True))

    with torch.no_grad():
        new = float(fit(model, decay, test[:]))
    history = tuner.history
    print(
        f"validation loss {history[0]['val_loss']:.2f} → {history[-1]['val_loss']:.2f}; on new data {new:.2f}"
    )
    rates = decay.values()["weight"][0]
    print(
        f"mean decay of the useful inputs {rates[:USEFUL].mean():.2g}, of the others {rates[USEFUL:].mean():.2g}"
    )
    print(f"{len(history)} hyper-steps; restored from accelerate's checkpoint: {same}")


if __name__ == "__main__":
    main()
