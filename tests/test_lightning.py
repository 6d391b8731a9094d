"""Tuning in Lightning's Trainer."""

import copy
import csv

import pytest
import torch

import bestresponse as br
import loops

L = pytest.importorskip("lightning.pytorch", reason="needs lightning")

from bestresponse.integrations import LightningTuning, ManualTuning  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(workers|logging interval|litlogger|does not have many)"),
    pytest.mark.filterwarnings(
        "ignore:.*(ModelCheckpoint|Checkpoint directory|is not supported by the model)"
    ),
    pytest.mark.filterwarnings("ignore:.*(isinstance.treespec|mid-epoch|You have overridden)"),
]


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


class Module(L.LightningModule):
    def __init__(self, rate=0.1, decay=0.0, everything=False, **settings):
        super().__init__()
        self.net = loops.network()
        self.problem = loops.problem(self.net, **settings)
        self.decay = self.problem.hyper
        self.rate, self.of_optimizer, self.everything = rate, decay, everything

    def training_step(self, batch, index):
        return self.problem.train_loss(self.net, self.decay, batch)

    def configure_optimizers(self):
        held = self.parameters() if self.everything else self.problem.weights.values()
        return torch.optim.SGD(held, self.rate, weight_decay=self.of_optimizer)


def tune(module, method=None, **settings):
    hyper = torch.optim.Adam(module.decay.parameters(), 0.05)
    method = method or br.Implicit(br.Neumann(3, 0.1))
    return LightningTuning(module.problem, hyper, loops.batches(loops.data()[1]), method, **settings)


def trainer(folder, *found, **settings):
    defaults = {
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
        "max_steps": 8,
        "default_root_dir": folder,
    }
    return L.Trainer(callbacks=list(found), **defaults | settings)


def loader():
    return torch.utils.data.DataLoader(loops.data()[0], loops.BATCH)


def assert_rates(module, expected):
    for name, rate in module.decay.named_parameters():
        torch.testing.assert_close(rate.detach(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("accumulated", "clip"), [(1, None), (2, 0.3)])
def test_it_agrees_with_a_loop_by_hand(accumulated, clip, tmp_path):
    module = Module()
    tuning = tune(module, weight_steps=2)
    given = {"accumulate_grad_batches": accumulated, "gradient_clip_val": clip}
    trainer(tmp_path, tuning, **given).fit(module, loader())
    assert_rates(module, loops.by_hand(loops.problem(loops.network()), 8, 2, accumulated, clip))
    assert [row["weight_step"] for row in tuning.history] == [2, 4, 6, 8]
    with torch.no_grad():
        first = loops.problem(loops.network())
        value = float(first.train_loss(first.model, first.hyper, loops.data()[0][:]))
    assert tuning.history[0]["train_loss"] == pytest.approx(value, rel=0.2)
    assert all(p.grad is None for p in module.decay.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in module.decay.parameters())


def test_mixed_precision_holds_in_the_losses_of_a_hyper_step(tmp_path):
    module, seen = Module(), []
    plain = module.problem.val_loss
    module.problem.val_loss = lambda m, h, b: seen.append(torch.is_autocast_enabled("cpu")) or plain(m, h, b)
    tuning = tune(module, br.Implicit(), weight_steps=2)
    trainer(tmp_path, tuning, precision="bf16-mixed").fit(module, loader())
    assert len(tuning.history) == 4
    assert set(seen) == {True}
    exact = loops.by_hand(loops.problem(loops.network()), 8, 2, method=br.Implicit())
    for name, rate in module.decay.named_parameters():
        moved, right = (x - torch.tensor(0.05).log() for x in (rate.detach(), exact[name]))
        assert float((moved.sign() == right.sign()).double().mean()) > 0.8


@pytest.mark.parametrize("weights_only", [False, True])
def test_training_resumes_from_lightnings_checkpoint(weights_only, tmp_path):
    def made():
        module = Module()
        return module, tune(module, br.Implicit(), weight_steps=2)

    module, tuning = made()
    trainer(tmp_path, tuning, max_epochs=2, max_steps=-1).fit(module, loader())
    half, first = made()
    stopped = trainer(tmp_path, first, max_epochs=1, max_steps=-1)
    stopped.fit(half, loader())
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    again, resumed = made()
    trainer(tmp_path, resumed, max_epochs=2, max_steps=-1).fit(
        again, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=weights_only
    )
    assert len(resumed.history) == len(tuning.history) == 8
    for name, rate in module.decay.named_parameters():
        assert torch.equal(rate, again.decay.get_parameter(name))
    assert resumed.history[-1]["residual"] == tuning.history[-1]["residual"]


def test_the_numbers_reach_loggers_and_monitors(tmp_path):
    module = Module()
    tuning = tune(module, weight_steps=2, watch=loops.batches(loops.data()[1]))
    logger = L.loggers.CSVLogger(tmp_path) if hasattr(L, "loggers") else True
    keep = L.callbacks.ModelCheckpoint(tmp_path / "kept", monitor="hyper/val_loss", every_n_train_steps=2)
    trainer(tmp_path, tuning, keep, logger=logger, enable_checkpointing=True).fit(module, loader())
    with open(logger.log_dir + "/metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["hyper/val_loss"]]
    assert [float(row["hyper/val_loss"]) for row in rows] == pytest.approx(
        [row["val_loss"] for row in tuning.history]
    )
    assert [int(row["step"]) for row in rows] == [2, 4, 6, 8]
    assert keep.best_model_score == pytest.approx(min(row["val_loss"] for row in tuning.history))


def test_early_stopping_ends_the_trainer(tmp_path):
    module = Module()
    tuning = tune(
        module, weight_steps=2, callbacks=[lambda t: t.stop("enough") if t.hyper_step == 2 else None]
    )
    found = trainer(tmp_path, tuning)
    found.fit(module, loader())
    assert found.global_step == 4
    assert len(tuning.history) == 2


def test_a_second_fit_goes_on(tmp_path):
    module = Module()
    tuning = tune(module, weight_steps=2)
    trainer(tmp_path, tuning, max_steps=4).fit(module, loader())
    trainer(tmp_path, tuning, max_steps=4).fit(module, loader())
    assert [row["hyper_step"] for row in tuning.history] == [1, 2, 3, 4]
    assert tuning.tuning.tuner.last_hyper_step == 4


def test_lasso_weights_stop_at_zero(tmp_path):
    module = Module(power=1)
    tuning = tune(module, br.Implicit(), weight_steps=8)
    trainer(tmp_path, tuning, max_steps=48, max_epochs=-1, gradient_clip_val=5.0).fit(module, loader())
    assert sum(int((w == 0).sum()) for w in module.net.parameters()) > 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decay": 0.01}, "must have weight_decay=0"),
        ({"everything": True}, "must hold weights only; got the hyperparameters"),
    ],
)
def test_an_unfit_optimiser_is_refused(settings, words, tmp_path):
    module = Module(**settings)
    with pytest.raises(br.Error, match=words):
        trainer(tmp_path, tune(module)).fit(module, loader())


def test_what_lightning_does_itself_is_refused(tmp_path):
    module = Module()
    with pytest.raises(br.Error, match="the training loop does it"):
        trainer(tmp_path, tune(module, clip_weights=1.0)).fit(module, loader())


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


class ByHand(ManualTuning, Manual):
    def training_step(self, batch, index):
        super().training_step(batch, index)
        if index % 2:
            self.hyper_step(batch)


@pytest.mark.parametrize("kind", [Manual, ByHand])
def test_manual_optimisation(kind, tmp_path):
    module = kind()
    tuning = tune(module, weight_steps=2)
    trainer(tmp_path, tuning).fit(module, loader())
    assert_rates(module, loops.by_hand(loops.problem(loops.network()), 8, 2))
    assert [row["weight_step"] for row in tuning.history] == [2, 4, 6, 8]


def test_a_hyper_step_by_hand_needs_the_callback(tmp_path):
    module = ByHand()
    with pytest.raises(br.Error, match="needs a LightningTuning in the callbacks"):
        trainer(tmp_path).fit(module, loader())


def test_the_whole_module_may_be_the_model(tmp_path):
    class Whole(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = loops.network()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            return self.trainer.callbacks[0].problem.train_loss(self, decay, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Whole()
    decay = br.hyperparameters.WeightDecay(module, initial=0.05)
    problem = br.Problem(module, decay, loops.train_loss, loops.fit)
    tuning = LightningTuning(
        problem,
        torch.optim.Adam(decay.parameters(), 0.05),
        loops.batches(loops.data()[1]),
        br.Implicit(br.Neumann(3, 0.1)),
        weight_steps=2,
    )
    trainer(tmp_path, tuning).fit(module, loader())
    expected = loops.by_hand(loops.problem(loops.network()), 8, 2)
    for name, rate in decay.named_parameters():
        torch.testing.assert_close(rate.detach(), expected[name.replace("net.", "")], rtol=1e-5, atol=1e-6)
    assert copy.deepcopy(decay.state_dict()).keys() == dict(decay.named_parameters()).keys()


def test_a_checkpoint_without_tuning_is_warned_of(tmp_path):
    module = Module()
    first = trainer(tmp_path)
    first.fit(module, loader())
    first.save_checkpoint(tmp_path / "plain.ckpt")
    tuning = tune(module, weight_steps=2)
    with pytest.warns(br.BestResponseWarning, match="tuning begins anew"):
        trainer(tmp_path, tuning, max_steps=10).fit(module, loader(), ckpt_path=tmp_path / "plain.ckpt")
    assert len(tuning.history) == 1


def test_hyperparameters_in_half_precision_are_warned_of(tmp_path):
    module = Module()
    with pytest.warns(br.BestResponseWarning, match="small steps are lost in half precision"):
        trainer(tmp_path, tune(module, weight_steps=4), precision="bf16-true").fit(module, loader())


def test_unknown_settings_are_named():
    with pytest.raises(br.Error, match=r"must be arguments of Tuner.*\['every'\]"):
        tune(Module(), every=3)
