"""The command for a problem of the user's: where it comes from, by which method, and the files of a run."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

import bestresponse as br
from bestresponse import cli
from bestresponse.errors import ArgumentTypeError, Error, nearest
from bestresponse.experiments import catalogue
from bestresponse.tuning import Setup
from bestresponse.tuning.method_names import method_of
from bestresponse.tuning.run import Tune
from bestresponse.tuning.setup import made
from pages import python_of

pytest.importorskip("matplotlib")
pytest.importorskip("tyro")

PROBLEM = """
import torch
from torch import nn
import bestresponse as br
from bestresponse.tuning import Setup

def make_problem(fail=None):
    x, y = torch.randn(40, 5), torch.randn(40)
    model = nn.Linear(5, 1)
    calls = []

    def val(model, hyper, batch):
        calls.append(1)
        if len(calls) == fail:
            raise KeyboardInterrupt
        return (model(x[batch]).squeeze(1) - y[batch]).square().mean()

    def train(model, hyper, batch):
        return (model(x[batch]).squeeze(1) - y[batch]).square().mean() + hyper(model)

    problem = br.Problem(model, br.hyperparameters.WeightDecay(model), train, val)
    parts = [slice(0, 10), slice(10, 20)], [slice(20, 30)], [slice(30, 40)]
    return Setup(problem, *parts, weight_optimizer=torch.optim.SGD(model.parameters(), 0.1))

def interrupted():
    return make_problem(fail=9)

def as_tuple():
    setup = make_problem()
    return setup.problem, setup.train_batches[0], setup.val_batches[0]

def without_watch():
    setup = make_problem()
    setup.watch = None
    return setup

def number():
    return 3

def raises():
    return {}["labels"]
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(PROBLEM, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("mine", None)


def tune(*words):
    return cli.main(["tune", *map(str, words)])


def rows_of(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_a_run_writes_its_files(tmp_path, capsys):
    out = tmp_path / "run"
    words = (
        "mine.py:make_problem",
        "--steps",
        4,
        "--watch-every",
        2,
        "--out",
        out,
        "--method",
        "Implicit(Neumann(3))",
    )
    assert tune(*words) == 0
    shown = capsys.readouterr()
    assert "best on the watch" in shown.out
    assert shown.out.endswith(f"written to {out}\n")
    assert "4 of 4 hyper-steps" in shown.err
    config = json.loads((out / "config.json").read_text())
    assert config["method"].startswith("Implicit(solver=Neumann(terms=3")
    assert config["weight_optimizer"] == "SGD(lr=0.1)"
    result = json.loads((out / "result.json").read_text())
    assert result["headline"]["watch loss, lowest"] == min(
        r["watch_loss"] for r in rows_of(out) if "watch_loss" in r
    )
    assert result["versions"]["torch"] == torch.__version__
    assert "<svg" in (out / "report.html").read_text(encoding="utf-8")
    state = torch.load(out / "tuned.pt", weights_only=True)
    assert state["hyper_step"] in (2, 4)
    assert state["model"].keys() == {"weight", "bias"}


def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = ("mine:make_problem", "--watch-every", 1)
    assert tune(*words, "--steps", 5, "--out", whole) == 0
    assert tune(*words, "--steps", 3, "--out", parts) == 0
    assert tune(*words, "--steps", 5, "--out", parts, "--resume") == 0
    assert without_time(rows_of(parts)) == without_time(rows_of(whole))
    assert json.loads((parts / "config.json").read_text())["resumed_after"] == [3]
    assert "1 (3)" in (parts / "report.html").read_text(encoding="utf-8")
    assert tune("mine:make_problem", "--steps", 5, "--out", parts, "--resume", "--seed", 1) == 1
    assert "it had seed=0" in capsys.readouterr().err
    assert tune("mine:make_problem", "--out", tmp_path / "none", "--resume") == 1
    assert "no config.json" in capsys.readouterr().err


def test_an_interrupted_run_can_be_resumed(tmp_path, capsys):
    out = tmp_path / "run"
    assert tune("mine:interrupted", "--steps", 30, "--save-every", 1, "--out", out) == 130
    assert "--resume" in capsys.readouterr().err
    assert 0 < len(rows_of(out)) < 30
    assert "was interrupted" in (out / "report.html").read_text(encoding="utf-8")
    assert not (out / "result.json").exists()


def test_a_function_of_check_can_be_tuned(tmp_path):
    assert tune("mine:as_tuple", "--steps", 2, "--out", tmp_path / "run") == 0
    assert "watch loss" not in (tmp_path / "run" / "result.json").read_text()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mine.py"], "path/to/file.py:function"),
        (["min.py:make_problem"], "Did you mean 'mine.py'?"),
        (["mine:make"], "Did you mean 'make_problem'?"),
        (["mine:number"], "must return"),
        (["mine:raises"], "raised KeyError"),
        (["mine:make_problem", "--steps", "0"], "--steps must be an integer ≥ 1"),
        (["mine:without_watch", "--patience", "3"], "0 without a watch"),
        (["mine:make_problem", "--method", "Neuman(3)"], "Did you mean 'Neumann'?"),
        (["mine:make_problem", "--out", "mine.py"], "--out must name a folder"),
    ],
)
def test_what_cannot_be_tuned(words, expected, capsys):
    assert tune(*words) == 1
    err = capsys.readouterr().err
    assert expected in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("implicit", br.Implicit()),
        ("Implicit(br.Neumann(terms=20))", br.Implicit(br.Neumann(20))),
        ("Implicit(solvers.GMRES(20), warm_start=True)", br.Implicit(br.solvers.GMRES(20), warm_start=True)),
        ("Implicit(curvature=FiniteDifference())", br.Implicit(curvature=br.FiniteDifference())),
        (
            "Unrolled(10, 1e-1, rule=rules.SGD(momentum=0.9))",
            br.Unrolled(10, 0.1, rule=br.rules.SGD(momentum=0.9)),
        ),
        ("minres", br.Implicit(br.MINRES())),
        ("conjugate_gradient", br.Implicit(br.ConjugateGradient())),
        ("FiniteDifference()", br.Implicit(curvature=br.FiniteDifference())),
        ("Halves(Implicit())", br.Halves(br.Implicit())),
        ("GaussNewton()", br.Implicit(curvature=br.GaussNewton())),
    ],
)
def test_methods_by_their_text(text, method):
    assert repr(method_of(text)) == repr(method)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Unrolled", "Unrolled(steps, step_size, last=…"),
        ("Implicit(terms=3)", "wrong arguments for Implicit"),
        ("KFAC()", "Setup(method=...)"),
        ("Unrol(3)", "Did you mean 'Unrolled'?"),
        ("__import__('os').system('true')", "knows no 'system'"),
        ("Implicit(", "Quote it"),
        ("SGD()", "must be a name or a call"),
        ("3", "must be a name or a call"),
        ("Implicit(*[3])", "must be a name or a call"),
        ("Implicit(**{'solver': 3})", "must be a name or a call"),
        ("", "must be a name or a call"),
    ],
)
def test_texts_that_are_no_method(text, expected):
    with pytest.raises(Error, match=r"(?s)--method") as caught:
        method_of(text)
    assert expected in str(caught.value)


def test_a_setup_needs_a_problem_and_makes_its_optimisers():
    with pytest.raises(ArgumentTypeError, match="must be a Problem; got Linear"):
        Setup(torch.nn.Linear(1, 1), [], [])
    weight, hyper = made("mine:as_tuple").optimizers()
    assert isinstance(weight, torch.optim.Adam)
    assert isinstance(hyper, torch.optim.Adam)
    assert hyper.defaults["lr"] == 0.01


def test_nearest_names():
    assert nearest("neuman", ["Neumann", "MINRES"]) == " Did you mean 'Neumann'?"
    assert nearest("make", ["make_problem"]) == " Did you mean 'make_problem'?"
    assert nearest("xyz", ["Neumann"]) == ""
    assert nearest("", ["Neumann"]) == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["tun"], "Did you mean 'tune'?"), (["reproduce", "overfot"], "Did you mean 'overfit'?")],
)
def test_unknown_commands_are_answered_with_the_nearest(words, expected, capsys):
    assert cli.main(words) == 2
    assert capsys.readouterr().err.endswith(f"{expected}\n")


def test_an_unknown_option_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit):
        tune("mine:make_problem", "--metod", "minres")
    assert "--method" in capsys.readouterr().err


def test_the_help_names_every_experiment():
    assert cli._EXPERIMENTS.keys() == catalogue.EXPERIMENTS.keys()


# --- the file of init -------------------------------------------------------------------------------


def test_the_file_of_init_can_be_tuned_and_is_never_replaced(tmp_path, capsys):
    torch.set_default_dtype(torch.float32)
    assert cli.main(["init"]) == 0
    assert "bestresponse tune problem.py:make_problem" in capsys.readouterr().out
    text = (tmp_path / "problem.py").read_text(encoding="utf-8")
    assert "{file}" not in text
    assert tune("problem.py:make_problem", "--steps", 2, "--out", tmp_path / "run") == 0
    capsys.readouterr()
    for words, expected in ((["init"], "exists"), (["init", "problem.txt"], "ends in .py")):
        assert cli.main(words) == 1
        assert expected in capsys.readouterr().err
    assert (tmp_path / "problem.py").read_text(encoding="utf-8") == text
    assert cli.main(["init", "new/mine.py"]) == 0
    sys.modules.pop("problem")


@pytest.mark.slow
def test_the_file_of_init_is_better_after_tuning(tmp_path):
    torch.set_default_dtype(torch.float32)
    assert cli.main(["init"]) == 0
    assert tune("problem.py:make_problem", "--steps", 120, "--out", tmp_path / "run") == 0
    losses = [row["watch_loss"] for row in rows_of(tmp_path / "run") if "watch_loss" in row]
    assert min(losses) < 0.9 * losses[0]
    sys.modules.pop("problem")


def test_the_page_on_the_command_line_names_what_there_is(tmp_path):
    page = (Path(__file__).parent.parent / "docs" / "command-line.md").read_text(encoding="utf-8")
    setup, load, report = python_of(page)
    (tmp_path / "page.py").write_text(setup, encoding="utf-8")
    torch.set_default_dtype(torch.float32)
    assert tune("page.py:make_problem", "--steps", 2, "--out", "runs/first") == 0
    for name in re.findall(r"\w+\.(?:pt|html|jsonl|json)\b", page.partition("## The report")[0]):
        assert (tmp_path / "runs" / "first" / name).is_file()
    given = made("page.py:make_problem")
    weights, hyper = given.optimizers()
    names = {"torch": torch, "br": br, "model": given.problem.model, "problem": given.problem}
    exec(load, names)
    exec(report, names | {"weights": weights, "hyper": hyper})
    options = {f"--{name.replace('_', '-')}" for name in Tune.__dataclass_fields__}
    assert set(re.findall(r"`(--[\w-]+)", page.partition("## The report")[0])) <= options
    sys.modules.pop("page")


def test_an_unfinished_run_is_not_replaced_without_a_word(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    words = ["tune", "problem.py:make_problem", "--steps", "2", "--out", "run"]
    assert cli.main(words) == 0
    assert cli.main(words) == 0  # a finished run is replaced
    (tmp_path / "run" / "result.json").unlink()
    before = (tmp_path / "run" / "run.pt").read_bytes()
    assert cli.main(words) != 0
    assert "Add --resume to continue it" in capsys.readouterr().err
    assert (tmp_path / "run" / "run.pt").read_bytes() == before
    assert cli.main([*words, "--resume"]) == 0


def test_few_tuned_values_are_printed_and_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "import torch, torch.nn.functional as F, bestresponse as br\n"
        "from bestresponse.tuning import Setup\n"
        "def make():\n"
        "    x, y = torch.randn(60, 5), torch.randint(2, (60,))\n"
        "    model = torch.nn.Linear(5, 2)\n"
        "    classes = br.hyperparameters.Weights(2, 'sigmoid', sparse=False)\n"
        "    loss = lambda m, h, b: (h(b[1]) * F.cross_entropy(m(b[0]), b[1], reduction='none')).mean()\n"
        "    val = lambda m, h, b: F.cross_entropy(m(b[0]), b[1])\n"
        "    problem = br.Problem(model, classes, lambda m, h, b: loss(m, h, b) + 0.1 * m.weight.square().sum(), val)\n"
        "    return Setup(problem, [(x[::2], y[::2])], [(x[1::2], y[1::2])])\n"
    )
    assert cli.main(["tune", "own.py:make", "--steps", "3", "--out", "run"]) == 0
    stored = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["hyperparameters"][
        "weights"
    ]
    assert len(stored) == 2
    assert all(0.0 < value < 1.0 for value in stored)
    assert f"weights = {stored[0]:.4g}, {stored[1]:.4g}" in capsys.readouterr().out


def test_the_weights_are_trained_before_a_check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init"]) == 0
    losses = []
    for steps in ("0", "60"):
        words = ["check", "problem.py:make_problem", "--warmup-steps", steps, "--retrain-steps", "0"]
        assert cli.main(words) == 0
        losses.append(float(re.search(r"train_loss ([\d.]+)", capsys.readouterr().out)[1]))
    assert losses[1] < 0.8 * losses[0]
    assert cli.main(["check", "problem.py:make_problem", "--warmup-steps", "-1"]) == 2
