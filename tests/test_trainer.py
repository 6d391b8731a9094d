"""Tuning in the Trainer of Hugging Face's transformers."""

import pytest
import torch
from torch import nn

import bestresponse as br
import loops

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

from bestresponse.integrations import TrainerTuning  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


class Classifier(nn.Module):
    """A model with the interface that the Trainer wants."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net = loops.network()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, labels=None, **kwargs):
        logits = self.net(self.dropout(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        x, y = self.pairs[index]
        return {"x": x, "labels": y}


def fit(model, hyper, batch):
    return model(**batch)["loss"]


def train_loss(model, hyper, batch):
    return fit(model, hyper, batch) + hyper(model)


def make(folder, method=None, dropout=0.0, optimizer=None, decay=None, weight_steps=2, trained=None, **settings):
    """A Trainer without shuffling, with tuning, and its model and decays."""
    arguments = {
        "output_dir": str(folder),
        "max_steps": 8,
        "per_device_train_batch_size": loops.BATCH,
        "report_to": "none",
        "use_cpu": True,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
        "logging_steps": 4,
    }
    model = trained or Classifier(dropout)
    decay = decay or br.hyperparameters.WeightDecay(model, initial=0.05)
    problem = br.Problem(model, decay, train_loss, fit)
    train, val = map(Rows, loops.data())
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(**arguments | settings),
        train_dataset=train,
        eval_dataset=val,
        optimizers=(optimizer or torch.optim.SGD(problem.weights.values(), 0.1), None),
    )
    tuning = TrainerTuning(
        trainer,
        problem,
        torch.optim.Adam(decay.parameters(), 0.05),
        torch.utils.data.DataLoader(val, loops.BATCH, collate_fn=trainer.data_collator),
        method or br.Implicit(br.Neumann(3, 0.1)),
        weight_steps=weight_steps,
    )
    return trainer, tuning


@pytest.mark.parametrize(("accumulated", "clip"), [(1, 0.0), (2, 0.3)])
def test_it_agrees_with_a_loop_by_hand(accumulated, clip, tmp_path):
    trainer, tuning = make(tmp_path, gradient_accumulation_steps=accumulated, max_grad_norm=clip)
    trainer.train()
    expected = loops.by_hand(loops.problem(loops.network()), 8, 2, accumulated, clip)
    for name, rate in tuning.problem.hyperparameters.items():
        torch.testing.assert_close(rate.detach(), expected[name.replace("net.", "")], rtol=1e-5, atol=1e-6)
    assert [row["weight_step"] for row in tuning.history] == [2, 4, 6, 8]
    assert all(p.grad is None for p in tuning.problem.hyperparameters.values())
    assert not any(p._post_accumulate_grad_hooks for p in tuning.problem.hyperparameters.values())
