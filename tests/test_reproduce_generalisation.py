"""The experiment `generalisation`: its settings, its ways of tuning, its statistics, and that it continues."""

import json
import time

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")
pytest.importorskip("tyro")
pytest.importorskip("optuna")
pytest.importorskip("sklearn")

import bestresponse as br
from bestresponse import cli
from bestresponse.experiments import generalisation, generalisation_settings, ways_of_tuning
from bestresponse.experiments.generalisation import Generalisation
from bestresponse.experiments.image_regularisers import ImageRegularisers, augmented
from bestresponse.hyperparameters import WeightDecay

pytestmark = pytest.mark.filterwarnings("ignore:the linear solve ended")


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


SETTINGS = generalisation_settings.settings(None, stand_ins=True)


def test_the_settings_are_those_of_the_options():
    assert set(SETTINGS) == set(generalisation.get_args(generalisation.SettingName))
    assert tuple(ways_of_tuning.WAYS) == generalisation.get_args(generalisation.WayName)


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_begins_with_the_few_and_tunes_the_many(name):
    torch.manual_seed(0)
    setting = SETTINGS[name]
    examples, test = setting.data(0)
    model = setting.model()
    few = setting.few(model, len(examples[0]))
    many = setting.many(model, len(examples[0]), few, 0.3)
    numbers = [sum(p.numel() for p in hyper.parameters()) for hyper in (few, many)]
    assert numbers[0] <= 5 < numbers[1]
    losses = [ways_of_tuning.retrained(setting, hyper, examples, test, 0) for hyper in (few, many)]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
    model = setting.model()
    many = setting.many(model, len(examples[0]), few, 0.3)
    before = [p.detach().clone() for p in many.parameters()]
    setting.tune(model, many, examples, ways_of_tuning.Clock(0.0), lambda step: 1.0)
    moved = [not torch.equal(p, q) for p, q in zip(many.parameters(), before, strict=True)]
    assert any(moved)


def test_blocks_that_are_set_aside_cover_all_examples_once():
    setting = SETTINGS["wine"]
    examples, test = setting.data(3)
    parts = setting.splits(examples)
    assert len(parts) == setting.watches
    torch.testing.assert_close(torch.cat([aside[0] for _, aside in parts]), examples[0])
    assert all(len(rest[0]) + len(aside[0]) == len(examples[0]) for rest, aside in parts)
    rows = {tuple(x.tolist()) for x in examples[0]}
    assert not any(tuple(x.tolist()) in rows for x in test[0])


def test_a_looser_stage_is_taken_only_beyond_its_standard_error():
    torch.manual_seed(0)
    base = torch.rand(200, dtype=torch.float64)
    noise = torch.randn(200, dtype=torch.float64)
    better, even = base - 0.1 + 0.01 * noise, base + 0.5 * (noise - noise.mean())
    assert ways_of_tuning._chosen([base, even])[0] == 0
    stage, gains = ways_of_tuning._chosen([base, even, better])
    assert stage == 2
    assert gains[0] == pytest.approx(0.0, abs=1e-6)
    assert gains[1] > 10
    assert ways_of_tuning._chosen([base, better, base])[0] == 1


def test_help_falls_back_to_the_few_where_nothing_is_gained(monkeypatch):
    """On examples whose losses never differ, the result is a module of few hyperparameters."""
    monkeypatch.setattr(ways_of_tuning, "retrained", lambda *_: torch.ones(10))
    setting = SETTINGS["wine"]
    found = ways_of_tuning.many_with_help(setting, setting.data(0)[0], ways_of_tuning.Clock(0.0), 0)
    assert sum(p.numel() for p in found.hyper.parameters()) == 1
    assert found.notes["shrinkage"] == 1.0


@pytest.mark.parametrize("name", ["mlp-500", "cnn", "lstm"])
def test_a_network_is_tuned_along_whole_trainings(name, monkeypatch):
    """Each training begins at new weights and goes on to the end, and the model has the weights of the last one."""
    torch.manual_seed(0)
    setting = SETTINGS[name]
    examples, _ = setting.data(0)
    begins, tuners = [], []
    monkeypatch.setattr(br.Tuner, "fit", watched(br.Tuner.fit, begins, tuners))

    def stop(tuner):
        if len(tuners) == 3:
            tuner.stop("enough")

    model = setting.model()
    hyper = setting.few(model, len(examples[0]))
    before = [p.detach().clone() for p in hyper.parameters()]
    steps = setting.tune(model, hyper, examples, stop, lambda step: 1.0)
    assert steps == len(tuners[0].history) + len(tuners[1].history) + 1
    assert [tuner.weight_step for tuner in tuners[:2]] == 2 * [tuners[0].warmup_steps + setting.weight_steps]
    assert not torch.equal(begins[0], begins[1])
    for key, weight in tuners[1].problem.weights.items():
        assert torch.equal(weight, model.get_parameter(key))
    assert any(not torch.equal(p, q) for p, q in zip(hyper.parameters(), before, strict=True))


def watched(fit, begins, tuners):
    def call(tuner, *arguments):
        tuners.append(tuner)
        begins.append(next(iter(tuner.problem.weights.values())).detach().clone())
        return fit(tuner, *arguments)

    return call


@pytest.mark.parametrize(("gains", "shrinkage"), [((0.0, 0.0), 1.0), ((0.5, 0.0), 0.3), ((0.0, 0.5), 0.0)])
def test_help_for_networks_takes_the_kind_that_unseen_examples_prefer(gains, shrinkage, monkeypatch):
    setting = SETTINGS["mlp-500"]
    losses = iter([torch.ones(10) - gain for gain in (0.0, *gains)])
    monkeypatch.setattr(type(setting), "example_losses", lambda *_: next(losses))
    found = ways_of_tuning.many_with_help(setting, setting.data(0)[0], ways_of_tuning.Clock(0.0), 0)
    assert found.notes["shrinkage"] == shrinkage
    assert (sum(p.numel() for p in found.hyper.parameters()) == 1) == (shrinkage == 1.0)


def test_the_clock_counts_processor_time():
    clock = ways_of_tuning.Clock(100.0)
    time.sleep(0.2)
    assert clock.spent < 0.15
    assert clock.share < 0.01


def test_augmentation_without_strength_changes_nothing_and_its_strength_has_a_gradient():
    x = torch.randn(3, 2, 8, 8)
    torch.testing.assert_close(augmented(x, torch.zeros(5)), x, rtol=1e-4, atol=1e-4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(128, 4))
    hyper = ImageRegularisers(WeightDecay(model, per="global"), None, 4, 1.0)
    hyper.train_loss(model, (x, torch.tensor([0, 1, 2]))).backward()
    assert bool((hyper.strength.grad != 0).all())
    with torch.no_grad():
        hyper.strength[0] += 1.0
    hyper.shrink_()
    assert float(hyper.strength.detach().std()) < 1e-6


def rows_of(few, helped, optuna):
    """Rows with these test losses for seeds 0, 1, …"""
    ways = {"few": few, "many with help": helped, "few by Optuna": optuna}
    return [
        {"setting": "wine", "way": way, "seed": seed, "test loss": loss}
        for way, losses in ways.items()
        for seed, loss in enumerate(losses)
    ]


def test_differences_are_paired():
    rows = rows_of([1.0, 2.0, 3.0], [0.9, 1.9, 2.8], [1.0, 1.8, 3.2])
    experiment = Generalisation()
    (line,) = experiment.table(rows)
    assert line["few ±"] == pytest.approx(1.0 / 3**0.5)
    assert line["help − few"] == pytest.approx(-0.4 / 3)
    assert line["help − few ±"] == pytest.approx(0.1 / 3)
    numbers = experiment.headline([line], rows)
    assert (numbers["help − few, better"], numbers["help − few, worse"]) == (1, 0)
    assert (numbers["help − Optuna, better"], numbers["help − Optuna, worse"]) == (0, 0)
    (line,) = experiment.table(rows_of([1.0], [0.5], []))
    assert line["help − few"] == -0.5
    assert experiment.headline([line], [])["help − few, better"] == 0  # one seed has no standard error


def test_a_finished_row_is_kept(tmp_path, monkeypatch):
    out = tmp_path / "run"
    words = ["reproduce", "generalisation", "--settings", "wine", "--budget", "0.001", "--out", str(out)]
    assert cli.main([*words, "--ways", "defaults", "few"]) == 0
    first = json.loads((out / "result.json").read_text())["rows"]

    def fail(*_):
        raise AssertionError("a finished row was run again")

    monkeypatch.setitem(ways_of_tuning.WAYS, "few", fail)
    assert cli.main([*words, "--ways", "few"]) == 0
    (line,) = json.loads((out / "result.json").read_text())["rows"]
    assert line["few"] == first[0]["few"]
