"""Tune the decay of each tensor of a small GPT-2 inside Hugging Face's Trainer.

The model is made from a configuration and overfits its 32 texts; nothing is downloaded. The same training with the
first decays is the baseline.

    pip install 'bestresponse[transformers]'
    python examples/in_transformers.py
"""

import tempfile

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import bestresponse as br
from bestresponse.integrations import TrainerTuning

TOKENS = 20


def fit(model: nn.Module, decay: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def train_loss(model: nn.Module, decay: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return fit(model, decay, batch) + decay(model)


def texts(number: int) -> list[dict[str, Tensor]]:
    """Rows of tokens that rise, with one wrong token in each."""
    rows = torch.randint(TOKENS, (number, 12)).sort(dim=1).values
    rows[torch.arange(number), torch.randint(12, (number,))] = torch.randint(TOKENS, (number,))
    return [{"input_ids": row, "labels": row} for row in rows]


def train(tune: bool) -> tuple[float, list[float]]:
    """The loss on new texts, and the validation loss of each hyper-step."""
    torch.manual_seed(0)
    training, val, test = texts(32), texts(100), texts(500)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=TOKENS, n_positions=12, n_embd=48, n_layer=1, n_head=2, **special)
    )
    decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=1e-3)
    problem = br.Problem(model, decay, train_loss, fit)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=100,
            learning_rate=1e-2,
            per_device_train_batch_size=16,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = Trainer(model, arguments, train_dataset=training)
        tuning = TrainerTuning(
            trainer,
            problem,
            torch.optim.Adam(decay.parameters(), 0.3 if tune else 0.0),
            DataLoader(val, 100, collate_fn=trainer.data_collator),
            br.Implicit(),
            weight_steps=4,
        )
        trainer.train()
    model.eval()
    with torch.no_grad():
        return float(fit(model, decay, trainer.data_collator(test))), [r["val_loss"] for r in tuning.history]


def main() -> None:
    (fixed, _), (tuned, history) = train(tune=False), train(tune=True)
    print(f"validation loss {history[0]:.3f} → {history[-1]:.3f}")
    print(f"loss on new texts with the first decays {fixed:.3f}, with tuned ones {tuned:.3f}")


if __name__ == "__main__":
    main()
