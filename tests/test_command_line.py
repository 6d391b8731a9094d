"""The manners of the command line: what it writes, how wide, and where."""

import io
import os
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

import bestresponse as br
from bestresponse import _layout
from bestresponse.runs import progress

pytest.importorskip("matplotlib")
pytest.importorskip("tyro")
from bestresponse import cli
from bestresponse.experiments import catalogue, cost
from bestresponse.experiments.experiment import Repeated

PROBLEM = """
import torch
from torch import nn
import bestresponse as br


def make():
    torch.manual_seed(0)
    x, y = torch.randn(40, 5), torch.randn(40)
    model = nn.Linear(5, 1)

    def val(model, hyper, batch):
        return (model(batch[0]).squeeze(1) - batch[1]).square().mean()

    def train(model, hyper, batch):
        return val(model, hyper, batch) + hyper(model)

    problem = br.Problem(model, br.hyperparameters.WeightDecay(model), train, val)
    return problem, (x[:20], y[:20]), (x[20:], y[20:])
"""


def widest(text):
    return max(map(len, text.splitlines()))


# --- progress -------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def advanced(total, times, **more):
    bar = progress.Bar(total, "step", **more)
    for number in range(times):
        bar.advance(text=f"loss {number}")
    bar.close()


def test_a_line_every_ten_per_cent_where_there_is_no_terminal(capsys):
    advanced(200, 200)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"{20 * i} of 200 steps" for i in range(1, 11)]
    assert lines[0].endswith("0 s, 0 s left: loss 19")
    advanced(3, 3)
    assert len(capsys.readouterr().err.splitlines()) == 3
    advanced(100, 40, begun=60)
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()] == ["70", "80", "90", "100"]
    advanced(10, 10, shown=False)
    assert capsys.readouterr().err == ""


def test_a_line_every_thirty_seconds_where_there_is_no_terminal(capsys, monkeypatch):
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    advanced(1_000_000, 9)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"{n} of 1000000 steps, {10 * n} s, 2778 h left" for n in (3, 6, 9)
    ]
    now = iter(range(0, 10_000, 40))
    advanced(0, 3)
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "1 steps, 40 s",
        "2 steps, 80 s",
        "3 steps, 2 min",
    ]
    now = iter(range(0, 10_000, 40))
    advanced(40, 4)
    assert capsys.readouterr().err.splitlines()[-1].startswith("4 of 40 steps, 3 min, 24 min left")


def test_a_bar_in_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    advanced(20, 20)
    assert "\r" in terminal.getvalue()
    assert "loss 19" in terminal.getvalue()
    assert "20/20" in terminal.getvalue()


# --- width ----------------------------------------------------------------------------------------

ROWS = [
    {
        "method": "conjugate gradient, recycled",
        "number of products": 57_023_306,
        "error": 1.23456,
        "ok": True,
    },
    {"method": "Neumann", "number of products": 2, "error": None, "ok": False},
]


def test_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = _layout.table([{"a": 1.23456, "b": None, "c": 57_023_306}, {"a": 2, "c": "x"}]).splitlines()
    assert lines[0].split() == ["a", "b", "c"]
    assert lines[2].split() == ["1.23", "–", "57,023,306"]
    assert lines[3].split() == ["2", "–", "x"]


@pytest.mark.parametrize("columns", [24, 40, 50, 60, 70, 100])
def test_a_table_fits_the_terminal_and_has_every_cell(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = _layout.table(ROWS)
    assert widest(text) <= columns
    for word in ("gradient,", "recycled", "products", "57,023,306", "1.23", "–", "yes", "no", "Neumann"):
        assert word in text
    assert ("method: Neumann" in text) == (columns < 50)
    assert len(text.splitlines()) == {100: 4, 70: 4, 60: 4, 50: 6}.get(columns, len(text.splitlines()))


def test_a_check_fits_sixty_columns_and_says_what_is_running(monkeypatch, tmp_path, capfd):
    (tmp_path / "sixty_columns.py").write_text(PROBLEM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.main(["check", "sixty_columns:make", "--retrain-steps", "20"]) == 0
    shown, progress = capfd.readouterr()  # with what C++ writes, such as the profiler
    assert shown.startswith("Problem(")
    assert widest(shown) <= 60
    assert "method: Implicit()" in shown
    assert "of retraining: " in shown
    parts = re.split(r"^checking: ", progress, flags=re.MULTILINE)
    assert parts[:3] == ["", "the losses\n", "a first hypergradient\n"]
    assert parts[-1].startswith(f"method {len(parts) - 6} of {len(parts) - 6}, SAMA")
    assert widest(progress) <= 60


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("split", ("--steps", 2, "--examples", 40)),
        ("overfit", ("--steps", 2, "--model", "linear")),
        ("shapes", ("--weight-steps", 5)),
    ],
)
def test_an_experiment_fits_sixty_columns(name, options, monkeypatch, tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["reproduce", name, *map(str, options), "--out", str(tmp_path)]) == 0
    *shown, folder = capsys.readouterr().out.splitlines()
    assert folder == f"written to {tmp_path}"
    assert max(map(len, shown)) <= 60


def test_the_list_of_commands_fits_sixty_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert widest(shown) <= 60
    assert all(name in shown for name in catalogue.EXPERIMENTS)


# --- what else is written -------------------------------------------------------------------------


def test_the_package_is_the_command():
    environment = os.environ | {"PYTHONPATH": str(Path(br.__file__).parents[1]), "PYTHONUTF8": "1"}
    words = [sys.executable, "-m", "bestresponse", "draw"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", env=environment, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("bestresponse: no such command: draw\n")


@pytest.mark.parametrize("name", catalogue.EXPERIMENTS)
def test_every_option_has_its_help(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        cli.main(["reproduce", name, "--help"])
    words = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert all(f"--{field.name.replace('_', '-')}" in words for field in fields(catalogue.EXPERIMENTS[name]))
    assert not re.findall(r"\S+ (?:[A-Z]+|\S*[\]}]|--no-\S+) \(default", words)


@pytest.mark.parametrize("name", catalogue.EXPERIMENTS)
def test_only_what_takes_several_seeds_offers_them(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    several = issubclass(catalogue.EXPERIMENTS[name], Repeated)
    assert several == (name not in ("overfit", "best-response", "shapes"))
    with pytest.raises(SystemExit):
        cli.main(["reproduce", name, "--help"])
    shown = capsys.readouterr().out
    assert ("--seeds" in shown) == several
    assert widest(shown) <= 60
    assert "None}" not in shown
    if not several:
        with pytest.raises(SystemExit) as stopped:
            cli.main(["reproduce", name, "--seeds", "2"])
        assert stopped.value.code == 2


# --- time / plain ---------------------------------------------------------------------------------


def tuned(every, waits=0.0, busy_for=0.0):
    """A pace, after twelve hyper-steps whose losses wait, beside a callback that is busy for longer."""
    x, y = torch.randn(20, 3), torch.randn(20)

    def val_loss(model, decay, batch):
        time.sleep(waits)
        return (model(x).squeeze(1) - y).square().mean()

    def make():
        model = nn.Linear(3, 1)
        decay = br.hyperparameters.WeightDecay(model)
        return br.Problem(model, decay, lambda m, h, b: val_loss(m, h, b) + h(m), val_loss, verify=False)

    copy, problem = make(), make()
    pace = cost.Pace(copy, torch.optim.SGD(copy.weights.values(), 0.1), None, every)
    optimizers = (
        torch.optim.SGD(problem.weights.values(), 0.1),
        torch.optim.SGD(problem.hyper.parameters(), 0.1),
    )

    def busy(_):
        until = time.process_time() + busy_for
        while time.process_time() < until:
            pass

    tuner = br.Tuner(
        problem, *optimizers, br.Implicit(br.Neumann(5, 0.1)), callbacks=[pace, busy, pace.begin]
    )
    tuner.fit([None], [None], 12)
    return pace


def test_plain_steps_take_turns_with_the_run():
    pace = tuned(every=3)
    assert (len(pace.tuned), len(pace.plain)) == (11, 4)
    assert pace.ratio() > 1


@pytest.mark.slow
def test_time_is_cpu_time_and_without_other_callbacks():
    pace = tuned(every=4, waits=0.1, busy_for=0.1)
    assert min(pace.plain) < 0.1  # the sleep is no CPU time
    assert min(pace.tuned) < 0.1


def test_no_ratio_before_anything_was_timed():
    copy = tuned(every=100)
    assert copy.plain == []
    assert copy.ratio() is None


def test_time_over_plain_is_explained_under_the_table(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    words = ["reproduce", "overfit", "--steps", "4", "--model", "linear", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    table, _, below = capsys.readouterr().out.partition("\n\n")
    assert "time / plain" in table.replace("\n", " ")
    assert "the CPU time of a weight step" in " ".join(below.split())
