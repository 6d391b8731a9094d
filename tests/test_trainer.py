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


def make(
    folder, method=None, dropout=0.0, optimizer=None, decay=None, weight_steps=2, trained=None, **settings
):
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


def rates(tuning):
    return {n: p.detach().clone() for n, p in tuning.problem.hyperparameters.items()}


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_training_resumes_from_the_trainers_checkpoint(folder, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 1}
    settings |= {"dropout": 0.3, "train_sampling_strategy": "random", "method": br.Implicit()}
    whole, tuning = make(tmp_path / "whole", **settings | {"max_steps": 11})
    whole.train()
    half, _ = make(tmp_path / "half", **settings | {"max_steps": 11})
    half.add_callback(StopAt(5))
    half.train()
    place = tmp_path / "half" / "checkpoint-5"
    if folder:
        place = place.rename(tmp_path / folder)
    again, resumed = make(tmp_path / "half", **settings | {"max_steps": 11})
    again.train(resume_from_checkpoint=str(place) if folder else True)
    assert [row["weight_step"] for row in resumed.history] == [2, 4, 6, 8, 10]
    for name, rate in rates(tuning).items():
        assert torch.equal(rate, rates(resumed)[name])
    assert resumed.history[-1]["train_loss"] == tuning.history[-1]["train_loss"]
    assert resumed.tuning.tuner.last_hyper_step == tuning.tuning.tuner.last_hyper_step == 5


class StopAt(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


def test_a_checkpoint_without_tuning_is_refused(tmp_path):
    trainer, _ = make(tmp_path, save_strategy="steps", save_steps=4)
    trainer.train()
    (tmp_path / "checkpoint-4" / "bestresponse.pt").unlink()
    with pytest.raises(br.Error, match=r"has no bestresponse\.pt"):
        make(tmp_path)[0].train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_the_trainers_own_optimiser_serves_and_decay_of_its_own_is_refused(tmp_path):
    trainer, tuning = make(tmp_path)
    trainer.optimizer = None
    trainer.train()
    assert type(tuning.tuning.tuner.weight_optimizer) is torch.optim.AdamW
    assert len(tuning.history) == 4
    trainer, tuning = make(tmp_path, weight_decay=0.01)
    trainer.optimizer = None
    with pytest.raises(br.Error, match="must have weight_decay=0"):
        trainer.train()
    assert not any(p._post_accumulate_grad_hooks for p in tuning.problem.hyperparameters.values())


class WithDecay(Classifier):
    def __init__(self):
        super().__init__()
        self.decay = br.hyperparameters.WeightDecay(self.net, initial=0.05)


def test_an_optimiser_that_holds_hyperparameters_is_refused(tmp_path):
    model = WithDecay()
    trainer, _ = make(tmp_path, trained=model, decay=model.decay)
    trainer.optimizer = None
    with pytest.raises(br.Error, match="must hold weights only; got the hyperparameters"):
        trainer.train()


def test_hyperparameters_in_the_model_stay_out_of_its_clipping(tmp_path):
    model = WithDecay()
    decay = model.decay
    model.decay = Within(decay)
    trainer, tuning = make(tmp_path, trained=model, decay=model.decay, max_grad_norm=0.3)
    trainer.train()
    expected = loops.by_hand(loops.problem(loops.network()), 8, 2, clip=0.3)
    for name, rate in decay.named_parameters():
        torch.testing.assert_close(rate.detach(), expected[name], rtol=1e-5, atol=1e-6)


class Within(nn.Module):
    """The decay of a part of the model."""

    def __init__(self, decay):
        super().__init__()
        self.inner = decay

    def forward(self, model):
        return self.inner(model.net)


def test_the_last_hyper_step_is_logged_where_the_trainer_logs(tmp_path):
    trainer, tuning = make(tmp_path, weight_steps=1)
    trainer.train()
    logged = [log for log in trainer.state.log_history if "hyper/val_loss" in log]
    assert [log["step"] for log in logged] == [4, 8]
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [4, 8]
    assert logged[1]["hyper/val_loss"] == tuning.history[7]["val_loss"]
    assert not any("hyperparameters" in name for name in logged[0])
    trainer, _ = make(tmp_path, logging_strategy="no")
    trainer.train()
    assert not any("hyper/val_loss" in log for log in trainer.state.log_history)


def test_evaluation_keeps_the_trainers_loss(tmp_path):
    trainer, tuning = make(tmp_path)
    trainer.train()
    with torch.no_grad():
        x, y = loops.data()[1][:]
        value = float(tuning.problem.model(x, y)["loss"])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(value, rel=1e-4)


def test_mixed_precision(tmp_path):
    trainer, tuning = make(tmp_path, bf16=True)
    trainer.train()
    exact = loops.by_hand(loops.problem(loops.network()), 8, 2)
    for name, rate in rates(tuning).items():
        moved, right = (x - torch.tensor(0.05).log() for x in (rate, exact[name.replace("net.", "")]))
        assert float((moved.sign() == right.sign()).double().mean()) > 0.8


def test_a_language_model_that_takes_counts_of_tokens_accumulates_means(tmp_path):
    """The Trainer would not divide the loss of such a model by the number of accumulated batches."""
    sizes = {"vocab_size": 12, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    torch.manual_seed(0)
    words = torch.randint(12, (32, 6))
    data = [{"input_ids": row, "labels": row} for row in words]

    def trained(accumulated):
        torch.manual_seed(1)
        model = transformers.GPT2LMHeadModel(config)
        decay = br.hyperparameters.WeightDecay(model, per="tensor", initial=0.01)
        problem = br.Problem(model, decay, lambda m, h, b: m(**b).loss + h(m), lambda m, h, b: m(**b).loss)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=8 // accumulated,
            gradient_accumulation_steps=accumulated,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant",
            disable_tqdm=True,
        )
        weights = torch.optim.SGD(problem.weights.values(), 0.1)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(weights, None))
        hyper = torch.optim.Adam(decay.parameters(), 0.05)
        method = br.Implicit(br.Neumann(2, 0.05))
        tuning = TrainerTuning(
            trainer, problem, hyper, [{"input_ids": words[:8], "labels": words[:8]}], method
        )
        trainer.train()
        return tuning

    once, twice = trained(1), trained(2)
    assert [row["train_loss"] for row in twice.history] == pytest.approx(
        [row["train_loss"] for row in once.history], rel=1e-4
    )
    for name, rate in rates(once).items():
        torch.testing.assert_close(rates(twice)[name], rate, rtol=1e-3, atol=1e-4)


def test_a_callback_of_the_tuner_stops_the_trainer(tmp_path):
    trainer, tuning = make(tmp_path)
    tuning.settings["callbacks"] = [lambda t: t.stop("enough")]
    trainer.train()
    assert trainer.state.global_step == 2


def test_lasso_weights_stop_at_zero_and_clipping_is_refused(tmp_path):
    def made(**settings):
        model = Classifier()
        decay = br.hyperparameters.WeightDecay(model, power=1, initial=0.05)
        return make(tmp_path, br.Implicit(), trained=model, decay=decay, weight_steps=8, **settings)

    trainer, tuning = made(max_steps=48)
    trainer.train()
    assert sum(int((w == 0).sum()) for w in tuning.problem.weights.values()) > 5
    with pytest.raises(br.Error, match="Set max_grad_norm=0"):
        made(max_grad_norm=1.0)[0].train()


def test_losses_of_the_trainer_are_refused(tmp_path):
    trainer, tuning = make(tmp_path)
    with pytest.raises(br.Error, match="takes one TrainerTuning"):
        TrainerTuning(trainer, tuning.problem, tuning.hyper_optimizer, [])
    trainer.remove_callback(tuning)
    trainer.args.label_smoothing_factor = 0.1
    with pytest.raises(br.Error, match="got label_smoothing_factor"):
        TrainerTuning(trainer, tuning.problem, tuning.hyper_optimizer, [])
    trainer.args.label_smoothing_factor, trainer.compute_loss_func = 0.0, lambda *a, **k: 0.0
    with pytest.raises(br.Error, match="got compute_loss_func"):
        TrainerTuning(trainer, tuning.problem, tuning.hyper_optimizer, [])
    trainer.compute_loss_func, trainer.args.load_best_model_at_end = None, True
    with pytest.raises(br.Error, match="must keep weights and hyperparameters together"):
        TrainerTuning(trainer, tuning.problem, tuning.hyper_optimizer, [])
    trainer.args.load_best_model_at_end = False
    trainer.__class__ = type("Own", (type(trainer),), {"compute_loss": lambda *a, **k: 0.0})
    with pytest.raises(br.Error, match="got a compute_loss of its own"):
        TrainerTuning(trainer, tuning.problem, tuning.hyper_optimizer, [])
    with pytest.raises(br.Error, match=r"must be a transformers\.Trainer"):
        TrainerTuning(tuning.problem, tuning.problem, tuning.hyper_optimizer, [])
