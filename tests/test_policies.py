"""What a run does when a loss, a gradient or a solve fails, and the clip of hypergradients."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LambdaLR

import bestresponse as br
from bestresponse.runs import callbacks
from bestresponse.runs.events import events

GOOD = (torch.linspace(-1, 1, 60).double().sin().view(20, 3), torch.arange(20) % 2)
BAD = (torch.full((20, 3), math.nan).double(), torch.arange(20) % 2)


def make(policy, rate=0.1, hyper_rate=0.1, method=None, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    decay = br.hyperparameters.WeightDecay(model, initial=0.01)

    def train_loss(model, decay, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) + decay(model)

    def val_loss(model, decay, batch):
        return F.cross_entropy(model(batch[0]), batch[1]) * (batch[2] if len(batch) > 2 else 1.0)

    problem = br.Problem(model, decay, train_loss, val_loss, verify=False)
    method = br.Implicit(br.Identity()) if method is None else method
    weights = torch.optim.Adam(problem.weights.values(), rate)
    hyper = torch.optim.SGD(problem.hyperparameters.values(), hyper_rate)
    return br.Tuner(problem, weights, hyper, method, policy=policy, **arguments)


def values(tuner):
    return [
        x.clone() for x in (*tuner.problem.model.state_dict().values(), *tuner.problem.hyper.parameters())
    ]


def same(one, other):
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_what_is_not_finite_raises(policy):
    for train, val in (([GOOD, GOOD, BAD], [GOOD]), ([GOOD], [GOOD, BAD])):
        with pytest.raises(br.Error, match="finite"):
            make(policy).fit(train, val, 4)


def test_a_weight_step_on_a_batch_that_is_not_finite_is_skipped_with_all_its_traces():
    tuner = make("skip", weight_steps=2)
    tuner.fit([GOOD], [GOOD], 1)
    before = values(tuner)
    with pytest.warns(br.BestResponseWarning, match="hyper-step 2 is skipped"):
        tuner.fit([BAD], [GOOD], 1)
    assert same(values(tuner), before)
    row = tuner.history[-1]
    assert row["event"].startswith("weight steps skipped: 2 since")
    assert math.isnan(row["train_loss"])
    assert not row["stepped"]
    tuner.fit([GOOD], [GOOD], 2)
    assert [row.get("event") for row in tuner.history[2:]] == [None, None]
    assert math.isfinite(tuner.history[-1]["val_loss"])


@pytest.mark.filterwarnings("ignore::bestresponse.BestResponseWarning")
def test_a_run_without_any_weight_step_ends():
    with pytest.raises(br.Error, match="no weight step was possible in 10 hyper-steps"):
        make("skip").fit([BAD], [GOOD], 100)


def test_a_validation_batch_that_is_not_finite_is_skipped():
    tuner = make("skip")
    with pytest.warns(br.BestResponseWarning, match="hyper-step 2 is skipped"):
        tuner.fit([GOOD], [GOOD, BAD], 4)
    assert [row["stepped"] for row in tuner.history] == [True, False, True, False]
    assert "val_loss must be finite, got nan" in tuner.history[1]["event"]
    assert events(tuner.history)[0] == {
        "event": "skipped",
        "times": 2,
        "first": 2,
        "last": 4,
        "the last one": "val_loss must be finite, got nan",
    }


def test_return_goes_back_to_the_last_good_state_with_smaller_hyper_steps():
    states = []
    tuner = make("return", callbacks=[lambda t: states.append(values(t))])
    tuner.hyper_scheduler = LambdaLR(tuner.hyper_optimizer, lambda step: 1.0)
    with pytest.warns(br.BestResponseWarning, match="hyper-step 3 returns to the last good state"):
        tuner.fit([GOOD], [GOOD, GOOD, BAD], 3)
    assert [row["stepped"] for row in tuner.history] == [True, True, False]
    number = len(tuner.problem.model.state_dict())
    assert same(values(tuner)[:number], states[1][:number])  # the weights at the second hypergradient
    assert same(values(tuner)[number:], states[0][number:])  # and the hyperparameters before its step
    assert tuner.hyper_optimizer.param_groups[0]["lr"] == 0.05
    tuner.fit([GOOD], [GOOD], 2)
    assert tuner.hyper_optimizer.param_groups[0]["lr"] == 0.05  # the scheduler's too
    assert tuner.history[2]["event"].startswith("returned: val_loss must be finite")
    assert [row["stepped"] for row in tuner.history[3:]] == [True, True]


SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 3),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=6),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 4, cycle_momentum=False),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.filterwarnings("ignore::bestresponse.BestResponseWarning")
def test_a_return_halves_the_rates_of_any_schedule_from_then_on(schedule):
    """The validation batch of the fifth hyper-step is not finite in one of two runs."""
    rates = {}
    for last in (GOOD, BAD):
        followed = []
        tuner = make(
            "return",
            callbacks=[lambda t, kept=followed: kept.append(t.hyper_optimizer.param_groups[0]["lr"])],
        )
        tuner.hyper_scheduler = SCHEDULES[schedule](tuner.hyper_optimizer)
        tuner.fit([GOOD], [GOOD, GOOD, GOOD, GOOD, last, *[GOOD] * 7], 12)
        rates[last is BAD] = followed
    assert rates[True][:4] == rates[False][:4]
    assert rates[True][4:] == pytest.approx([rate / 2 for rate in rates[False][4:]], rel=1e-9)


def test_return_survives_weights_that_diverge_at_large_hyperparameters():
    """Hyper-steps that are far too large for a weight decay: the run ends with a finite loss."""
    tuner = make("return", rate=0.3, hyper_rate=1e6, max_rise=3.0)
    tuner.weight_optimizer = torch.optim.SGD(tuner.problem.weights.values(), 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuner.fit([GOOD], [GOOD], 30)
    assert any("returned" in row.get("event", "") for row in tuner.history)
    assert tuner.history[-1]["val_loss"] < 1.0
    assert all(bool(x.isfinite().all()) for x in values(tuner))


@pytest.mark.filterwarnings("ignore::bestresponse.BestResponseWarning")
def test_return_ends_where_there_is_nothing_to_return_to_or_it_does_not_help():
    with pytest.raises(br.Error, match="hyper-step 1 has no good state to return to"):
        make("return").fit([BAD], [GOOD], 3)
    tuner = make("return")
    tuner.fit([GOOD], [GOOD], 1)
    with pytest.raises(br.Error, match="returned 10 times in a row"):
        tuner.fit([GOOD], [BAD], 100)
    assert tuner.hyper_step == 11


def test_a_run_that_returns_can_be_saved_and_restored(tmp_path):
    def run(*steps):
        batches, bad = [GOOD], [GOOD, GOOD, BAD]
        tuner = make("return")
        for number, some in enumerate(steps):
            if number:
                tuner.save(tmp_path / "run.pt")
                tuner = make("return")
                tuner.load(tmp_path / "run.pt")
            tuner.fit(batches, bad, some)
        return values(tuner), [row["val_loss"] for row in tuner.history if row["stepped"]]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (one, rows), (other, again) = run(7), run(2, 5)
    assert same(one, other)
    assert rows == again


HIGH = (*GOOD, 50.0)


def test_a_validation_loss_that_rises():
    with pytest.warns(
        br.BestResponseWarning, match="must not rise beyond max_rise; got .* more than 5 times"
    ):
        rows = make("warn", max_rise=5).fit([GOOD], [GOOD, GOOD, HIGH], 6)
    assert [row["stepped"] for row in rows] == [True] * 6
    assert ["event" in row for row in rows] == [False, False, True] * 2
    with pytest.raises(br.Error, match="at hyper-step 3"):
        make("raise", max_rise=5).fit([GOOD], [GOOD, GOOD, HIGH], 6)
    with pytest.warns(br.BestResponseWarning, match="skipped"):
        rows = make("skip", max_rise=5).fit([GOOD], [GOOD, GOOD, HIGH], 6)
    assert [row["stepped"] for row in rows] == [True, True, False] * 2
    with pytest.warns(br.BestResponseWarning, match="returns"):
        rows = make("return", max_rise=5).fit([GOOD], [GOOD, GOOD, HIGH], 6)
    assert [row["stepped"] for row in rows] == [True, True, False] * 2


def test_a_failed_solve_is_skipped_under_return():
    tuner = make("return", rate=1e-6, method=br.Implicit(br.ConjugateGradient(3)))
    tuner.problem.train_loss = lambda model, decay, batch: -decay(model)
    with pytest.warns(br.BestResponseWarning, match="skipped"):
        tuner.fit([GOOD], [GOOD], 12)
    assert all(row["event"] == "skipped: the solve ended with negative curvature" for row in tuner.history)


def test_the_hypergradient_is_clipped():
    def hyper(tuner):
        return torch.cat([p.detach().flatten() for p in tuner.problem.hyperparameters.values()])

    free = make("warn", hyper_rate=1.0)
    before = hyper(free)
    free.fit([GOOD], [GOOD], 1)
    step = hyper(free) - before
    norm = float(step.norm())
    clipped = make("warn", hyper_rate=1.0, clip_hypergradient=norm / 4)
    clipped.fit([GOOD], [GOOD], 1)
    torch.testing.assert_close(hyper(clipped) - before, step / 4, rtol=0.05, atol=0)
    assert "event" not in free.history[0]
    assert clipped.history[0]["event"] == f"hypergradient clipped: its norm was {norm:.4g}"
    assert free.history[0]["hypergradient_norm"] == clipped.history[0]["hypergradient_norm"]


def test_events_are_lines_in_the_table_of_a_command(tmp_path, capsys):
    experiment = pytest.importorskip("bestresponse.experiments.experiment")
    runs = pytest.importorskip("bestresponse.experiments.runs")

    class Small(experiment.Experiment):
        """An experiment."""

        name = "small"
        figures = ()
        labels = ()

        def tasks(self, device, folder):
            return [lambda: [{"hyper_step": 1, "loss": 1.0, "event": "skipped: as a test"}]]

        def headline(self, table, rows):
            return {}

        def table(self, rows):
            return [{"loss": 1.0}]

        def draw(self, folder, rows):
            pass

    experiment.run(Small(out=tmp_path / "out"))
    assert "as a test" in capsys.readouterr().out
    assert runs.read_json(tmp_path / "out" / "result.json")["events"][0]["event"] == "skipped"


def test_early_stopping_and_the_best_state_are_not_misled_by_events():
    best, stop = callbacks.KeepBest(), callbacks.EarlyStopping(patience=9)
    tuner = make("skip", callbacks=[best, stop])
    with pytest.warns(br.BestResponseWarning, match="skipped"):
        tuner.fit([GOOD], [GOOD, BAD], 6)
    assert math.isfinite(best.row["val_loss"])
    assert tuner.hyper_step == 6


def test_the_best_state_is_not_that_of_a_row_that_was_left():
    best = callbacks.KeepBest()
    tuner = make("return", callbacks=[best])
    tuner.fit([GOOD], [GOOD], 2)
    kept = best.row
    tuner.history.append(
        {"hyper_step": 3, "val_loss": -1.0, "event": "returned: the hypergradient is not finite"}
    )
    best(tuner)
    assert best.row is kept


def test_a_skipped_row_keeps_what_is_known():
    tuner = make("skip")
    tuner.problem.train_loss = lambda m, h, b: F.cross_entropy(m(b[0]), b[1]) + h(m) + (h(m) - h(m)).sqrt()
    with pytest.warns(br.BestResponseWarning, match="hyper-step 1 is skipped"):
        tuner.fit([GOOD], [GOOD], 1)
    row = tuner.history[0]
    assert not row["stepped"]
    assert "finite" in row["event"]
