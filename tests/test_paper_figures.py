"""The experiments that draw the paper's figures, at a size of seconds."""

import io
import json
import re
import shutil
from contextlib import redirect_stdout
from functools import partial
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br

pytest.importorskip("matplotlib")
pytest.importorskip("tyro")
from safetensors.torch import load_file

from bestresponse import cli
from bestresponse.diagnostics import measuring
from bestresponse.experiments import (
    catalogue,
    distill,
    distilled_set,
    experiment,
    orders,
    runs,
    small_problems,
    softmax,
    tuned_images,
)


@pytest.fixture(autouse=True)
def _single_precision():
    torch.set_default_dtype(torch.float32)


SMALL = {
    "augment": (
        *("--train", 40, "--validation", 60, "--batch", 20, "--validation-batch", 30, "--steps", 18),
        *("--warmup", 2, "--weight-steps", 4, "--save-every", 1),
    ),
    "best-response": ("--points", 5),
    "shapes": ("--weight-steps", 20),
    "inverse-error": ("--steps", 6, "--inversion-steps", 1, 5, 12, "--shown", 5),
    "inverse-hessian": ("--hidden", 2, "--terms", 1, 5, 20, "--steps", 100),
    "generalisation": ("--settings", "wine", "mlp-500", "--budget", 0.001),
    "distill": ("--steps", 4),
    "influence": ("--examples", 60, "--digits", 3, "--width", 4),
    "mixture": ("--ways", "uniform", "search by proxies", "Gauss-Newton"),
    "adapters": ("--ways", "frozen base", "helpful ones", "Gauss-Newton"),
    "noisy-labels": ("--hyper-steps", 2, "--warmup", 5, "--steps", 5),
    "split": ("--steps", 3, "--examples", 40, "--shares", 0.2, 0.5),
    "overfit-all": ("--steps", 2, "--model", "linear"),
    "lstm": (
        *("--steps", 30, "--train-words", 3000, "--words", 60, "--units", 6, "--length", 10),
        *("--trials", 4, "--save-every", 1),
    ),
    "methods": (
        *("--steps", 6, "--last", 2, "--terms", 2, "--training", 5, "--trials", 2),
        *("--classes", 2, "--sizes", 2, "--repeats", 1),
    ),
}

SLOW = {"methods", "augment", "mixture", "adapters"}

# With two seeds. For augment and lstm, whose rows take seconds, another test takes two.
TWICE = {
    "distill",
    "generalisation",
    "inverse-error",
    "inverse-hessian",
    "noisy-labels",
    "overfit-all",
    "split",
}


def reproduce(name, *options):
    return cli.main(["reproduce", name, *(str(option) for option in options)])


def result_of(folder):
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs each experiment at its small size, once for all tests; returns the folder and what the run printed."""
    known = {}

    def run_of(name):
        if name not in known:
            folder, shown = tmp_path_factory.mktemp(name) / "run", io.StringIO()
            seeds = ("--seeds", 2) if name in TWICE else ()
            with pytest.MonkeyPatch.context() as patched, redirect_stdout(shown):
                patched.setenv("COLUMNS", "250")
                patched.setattr(measuring, "_alive", list)  # slow among the many objects of a test session
                assert reproduce(name, *SMALL[name], *seeds, "--out", folder) == 0
            known[name] = folder, shown.getvalue()
        return known[name]

    return run_of


@pytest.fixture
def copy_of(finished, tmp_path):
    """Returns a copy of the folder of a finished run, which the test may change."""
    return lambda name: shutil.copytree(finished(name)[0], tmp_path / "run")


def test_every_experiment_but_the_tested_elsewhere_is_here():
    assert SMALL.keys() | {"overfit"} == catalogue.EXPERIMENTS.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SMALL],
)
@pytest.mark.filterwarnings(
    "ignore:the linear solve ended", "ignore:`is_gradient_checkpointing` is deprecated"
)
def test_an_experiment_leaves_its_files_and_its_figures_come_from_them_alone(name, finished, copy_of):
    for package, _ in getattr(catalogue.EXPERIMENTS[name], "packages", ()):
        pytest.importorskip(package)
    shown, out = finished(name)[1], copy_of(name)
    result, config = result_of(out), json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["experiment"] == name
    assert config["preset"] == "smoke"
    assert result["headline"]
    assert all(isinstance(value, float | int) for value in result["headline"].values())
    assert {"seed", "versions", "seconds"} <= result.keys()
    assert all(str(key) in shown for key in result["rows"][0])
    assert runs.read_rows(out)
    figures = {path.name: path.read_bytes() for path in out.glob("*.png")}
    assert figures
    for figure in figures:
        (out / figure).unlink()
    assert cli.main(["plot", str(out)]) == 0
    assert {path.name: path.read_bytes() for path in out.glob("*.png")} == figures


@pytest.mark.parametrize("name", ["augment", "lstm"])
def test_a_comparison_takes_several_seeds(name, tmp_path):
    options = [*SMALL[name], "--rows", "no tuning", "--seeds", 2]
    assert reproduce(name, *options, "--out", tmp_path) == 0
    result = result_of(tmp_path)
    assert result["folders"] == ["no-tuning-0", "no-tuning-1"]
    assert result["rows"][0]["seconds ±"] >= 0
    assert (tmp_path / f"{name}.png").is_file()


@pytest.mark.parametrize("name", catalogue.EXPERIMENTS)
def test_presets_say_what_they_are_and_help_shows_theirs(name, capsys):
    for preset in get_args(experiment.Preset):
        options = catalogue.EXPERIMENTS[name].of_preset(preset)
        assert options.preset == preset
        options.check()
        with pytest.raises(SystemExit) as stopped:
            reproduce(name, "--preset", preset, "--help")
        assert stopped.value.code == 0
        assert f"default: {preset}" in re.sub(r"[\s│]+", " ", capsys.readouterr().out)


def test_an_option_outranks_its_preset(tmp_path):
    out = tmp_path / "run"
    assert (
        reproduce("split", "--preset=cpu", "--data", "digits", "--seeds", 1, "--steps", 1, "--out", out) == 0
    )
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (config["preset"], config["steps"], config["examples"]) == ("cpu", 1, 500)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "split",
            ("--shares", 0.0, 0.5),
            "--shares must leave examples for training and for validation; got 0.0 of",
        ),
        ("split", ("--shares", 0.5, 0.5), "--shares must have at least one value, and each only once"),
        ("split", ("--steps", 0), "--steps must be positive and finite; got 0"),
        ("split", ("--seeds", 0), "--seeds must be positive"),
        ("lstm", ("--rows",), "--rows must have at least one value"),
        ("overfit-all", ("--data",), "--data must have at least one value"),
        (
            "augment",
            ("--rows", "identity", "no tuning", "identity"),
            "each only once; got identity, no tuning, id",
        ),
        ("augment", ("--batch", 1), "--train and --batch must be at least 2"),
        ("augment", ("--warmup", 120), "--steps must leave a hyper-step after --warmup; got 120 after 120"),
        ("augment", ("--wrong-labels", 1.5), "--wrong-labels must be between 0 and 1; got 1.5"),
        ("augment", ("--pooling", 3), "--pooling must leave 4×4 pixels; got 3"),
        ("augment", ("--train", 1000), "the training set has 1198"),
        ("augment", ("--bound", -1.0), "--bound must be ≥ 0"),
        ("lstm", ("--data", "ptb", "--data-dir", "nowhere"), "Penn TreeBank needs the file ptb.train.txt"),
        ("lstm", ("--trials", 0), "--trials must be positive"),
        ("methods", ("--last", 60), "--last must be at most --steps; got 60"),
        ("methods", ("--terms", 0, 1), "--terms must be positive and finite; got 0, 1"),
        ("methods", ("--sizes", 1), "--sizes must be between 2 and 10"),
        ("methods", ("--classes", 11), "--classes must be between 2 and 10"),
        ("distill", ("--per-class", 500), "at most the images of a class"),
        ("distill", ("--validation", 5000), "the training set has 1198"),
        ("distill", ("--validation", 5, "--start", "mixtures"), "needs an image of each class"),
        ("distill", ("--data", "cifar100", "--data-dir", "nowhere"), "CIFAR-100 needs the file"),
        ("inverse-error", ("--data", "boston", "--data-dir", "nowhere"), "boston_housing.csv"),
        ("inverse-error", ("--shown", 4), "--shown must be one of --inversion-steps"),
        ("methods", ("--device", "meta"), "--device must be cpu"),
        ("split", ("--shares", "nan"), "must leave examples"),
        ("split", ("--initial-log-decay", 1000), "--initial-log-decay must be between -14 and 3"),
        ("split", ("--examples", 5000), "the training set has 1198"),
        ("inverse-hessian", ("--terms", -3), "--terms must be ≥ 0 and finite; got -3"),
        ("inverse-error", ("--inversion-steps", 0, 5), "--inversion-steps must be positive"),
        ("best-response", ("--device", "nothing"), "--device must name a device"),
        ("inverse-hessian", ("--threads", -1), "--threads must be between 0 and 4096"),
    ],
)
def test_bad_options_are_one_sentence(name, options, message, tmp_path, capsys):
    assert reproduce(name, *options, "--out", tmp_path / "x") == 1
    assert not (tmp_path / "x").exists()  # found before anything is written, or taken away
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


# --- what they show -----------------------------------------------------------------------------------


def test_a_recycled_solve_is_nearer_than_both_series_at_each_number_of_steps(tmp_path):
    out = tmp_path / "run"
    reproduce("inverse-error", "--steps", 30, "--inversion-steps", 1, 3, "--shown", 3, "--out", out)
    rows = {(row["method"], row["inversion steps"]): row for row in result_of(out)["rows"]}
    for steps in (1, 3):
        recycled = rows["conjugate gradient, recycled", steps]
        for other in (rows["Neumann", steps], rows["conjugate gradient", steps]):
            assert recycled["cosine"] > other["cosine"]
            assert recycled["distance"] < other["distance"]


def test_a_longer_series_is_nearer_to_the_inverse(finished):
    exact, one, five, twenty = result_of(finished("inverse-hessian")[0])["rows"]
    assert exact["cosine"] == pytest.approx(1.0, abs=1e-12)
    assert exact["smallest eigenvalue"] > 0
    assert one["relative distance"] > five["relative distance"] > twenty["relative distance"]


def numbers_of(folder):
    """What a run found, without its times."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in result_of(folder)["rows"]]


@pytest.mark.parametrize(
    ("name", "more", "killed_twice"),
    [
        ("lstm", ("--rows", "7 rates", "self-tuning network"), True),
        ("lstm", ("--overfit",), False),
        pytest.param(
            "augment",
            ("--rows", "3 unrolled", "Gauss-Newton", "--learn", "both", "--beside"),
            True,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lstm", "overfit", "augment"],
)
def test_a_killed_comparison_goes_on_and_ends_with_the_same_numbers(
    name, more, killed_twice, tmp_path, monkeypatch
):
    options = [*SMALL[name], *more]
    assert reproduce(name, *options, "--out", tmp_path / "whole") == 0
    save, killed = br.callbacks.Checkpoint.__call__, []

    def save_and_stop(self, tuner):
        save(self, tuner)
        if tuner.hyper_step == 2 and len(killed) < 2:
            killed.append(tuner.problem)
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(br.callbacks.Checkpoint, "__call__", save_and_stop)
        statuses = [reproduce(name, *options, "--out", tmp_path / "killed") for _ in range(3)]
    assert statuses == ([130, 130, 0] if killed_twice else [130, 0, 0])
    assert numbers_of(tmp_path / "killed") == numbers_of(tmp_path / "whole")
    rows = [
        runs.read_rows(tmp_path / run / result_of(tmp_path / run)["folders"][0])
        for run in ("killed", "whole")
    ]
    for one, other in zip(*rows, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {
            k: v for k, v in other.items() if k != "seconds"
        }


@pytest.mark.slow
def test_methods_are_told_apart(tmp_path):
    """What must hold between rows, and the orders of memory that the paper gives."""
    out = tmp_path / "run"
    options = ["--steps", 60, "--last", 5, "--sizes", 6, "--classes", 2]
    assert reproduce("methods", *SMALL["methods"], *options, "--terms", 1, 20, "--out", out) == 0
    result = result_of(out)
    for problem in ("diabetes", "digits"):
        of = {row["method"]: row for row in result["rows"] if row["problem"] == problem}
        error = {name: row["relative error"] for name, row in of.items()}
        assert error["exact (Bengio)"] == 0.0
        assert error["conjugate gradient, 20"] < 1e-3
        assert error["the same, sixth call"] < min(error["recommended here"], 0.05)
        assert error["Neumann, 1"] > error["Neumann, 20"]
        assert error["truncated unrolled"] > error["unrolled"]
        assert error["unrolled"] == pytest.approx(error["forward"], rel=1e-9)
        assert of["unrolled"]["memory"] > 2 * of["truncated unrolled"]["memory"] > 2 * of["DrMAD"]["memory"]
        assert of["penalty"]["cosine"] > 0.99
        assert of["random search"]["relative error"] is None
    growth = {row["method"]: row for row in result["orders"]}
    for name, steps, weights, hyperparameters in (
        ("unrolled", 1, 1, 0),
        ("unrolled, a checkpoint every √I steps", 0.4, 1, 0),
        ("DrMAD", 0, 1, 0),
        ("linear hypernetwork", 0, 1, 1),
        ("Neumann, I terms", 0, 1, 0),
        ("conjugate gradient, I steps", 0, 1, 0),
    ):
        found = [growth[name][q] for q in ("steps I", "weights P", "hyperparameters H")]
        assert found == pytest.approx([steps, weights, hyperparameters], abs=0.15), name


@pytest.mark.parametrize(
    "name", ["unrolled", "self-tuning network", "Neumann, I terms", "conjugate gradient, I steps"]
)
def test_memory_grows_with_the_hyperparameters_where_these_are_many(name):
    """The H of the paper's table 2, beside 1,024 weights."""
    work, used = orders.METHODS[name][1], []
    for number in (2**18, 2**20):
        problem = orders.problem_of(1024, number)
        used.append(measuring.peak_bytes(lambda problem=problem: work(problem, 4)))
    assert used[1] / used[0] == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("data", ["diabetes", "digits"])
def test_the_exact_row_of_methods_is_exact(data):
    """It is the difference of validation losses of re-solved problems."""
    cases = small_problems.cases("diabetes", None, classes=2, log_decay=-3.0, seed=0)
    case = next(case for case in cases if case.name == data)
    case.put(case.optimum)
    h = br.hypergradient(case.problem, case.train, case.val, br.Implicit(br.Exact()))
    for name, parameter in case.problem.hyperparameters.items():
        flat, step = parameter.detach().view(-1), 1e-2
        for index in (0, flat.numel() - 1):
            kept, total = float(flat[index]), 0.0
            for shift, factor in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
                flat[index] = kept + shift * step
                total += factor * case.solve() / (12 * step)
            flat[index] = kept
            scale = float(h.total[name].abs().max())
            assert float(h.total[name].view(-1)[index]) == pytest.approx(total, rel=1e-5, abs=1e-6 * scale)


@pytest.mark.parametrize("name", ["best-response", "shapes"])
def test_the_figures_of_the_documentation_show_the_librarys_own_numbers(name, finished):
    assert next(iter(result_of(finished(name)[0])["headline"].values())) < 1e-12


@pytest.mark.parametrize(("name", "kept"), [("split", 6), ("split", 1), ("inverse-error", 30)])
def test_a_killed_run_is_drawn_as_far_as_it_came(name, kept, copy_of):
    out = copy_of(name)
    rows = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(rows) > kept
    (out / "metrics.jsonl").write_text("\n".join(rows[:kept]) + "\n", encoding="utf-8")
    assert cli.main(["plot", str(out)]) == 0


@pytest.mark.parametrize("name", [name for name in SMALL if name not in SLOW | {"overfit-all", "distill"}])
@pytest.mark.filterwarnings("ignore:the linear solve ended")
def test_a_run_without_rows_is_not_drawn(name, copy_of, capsys):
    out = copy_of(name)
    (out / "metrics.jsonl").write_text("", encoding="utf-8")
    assert cli.main(["plot", str(out)]) == 1
    assert "must hold rows to draw" in capsys.readouterr().err


def test_a_folder_that_is_used_again_keeps_nothing_of_the_earlier_run(copy_of, monkeypatch):
    out = copy_of("distill")
    assert len(list(out.iterdir())) > 5
    shutil.rmtree(out / "seed-1")  # not a file of this experiment, whose later seeds have folders

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(distill.softmax.ExactSoftmax, "__call__", stop)
    assert reproduce("distill", "--steps", 2, "--per-class", 2, "--out", out) == 130
    assert {path.name for path in out.iterdir()} == {"config.json"}
    assert cli.main(["plot", str(out)]) == 1


@pytest.mark.parametrize("content", ['{"headline": ', "{}", "[]"])
def test_a_damaged_run_is_run_again(content, copy_of):
    out = copy_of("overfit-all")
    (out / "digits-linear-0" / "row.json").write_text(content, encoding="utf-8")
    (out / "digits-linear-0" / "result.json").unlink()
    assert reproduce("overfit-all", *SMALL["overfit-all"], "--out", out) == 0
    assert result_of(out / "digits-linear-0")["rows"]


def test_the_last_preset_counts(tmp_path):
    out = tmp_path / "run"
    assert reproduce("split", "--preset", "cpu", *SMALL["split"], "--preset", "smoke", "--out", out) == 0
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (config["preset"], config["data"], config["seeds"]) == ("smoke", "digits", 1)


def test_runs_that_have_ended_are_not_run_again(copy_of):
    out = copy_of("overfit-all")
    before = result_of(out / "digits-linear-0")
    reproduce("overfit-all", "--steps", 2, "--model", "linear", "mlp", "--out", out)
    assert result_of(out / "digits-linear-0") == before
    assert len(runs.read_rows(out)) == 2
    reproduce("overfit-all", "--steps", 3, "--model", "linear", "--out", out)
    assert result_of(out / "digits-linear-0")["hyper_steps"] == 3


def test_mean_and_deviation():
    rows = [{"a": 1, "b": 2.0, "c": None}, {"a": 1, "b": 4.0, "c": 3.0}, {"a": 2, "b": 5.0, "c": None}]
    first, second = runs.mean_and_deviation(rows, ["a"], ["b", "c"])
    assert first == {"a": 1, "b": 3.0, "b ±": pytest.approx(2**0.5), "c": 3.0, "c ±": None}
    assert second == {"a": 2, "b": 5.0, "c": None}


# --- distillation -------------------------------------------------------------------------------------


def test_distilled_digits_teach_a_new_classifier_from_their_files(tmp_path):
    out = tmp_path / "run"
    assert reproduce("distill", "--steps", 40, "--out", out) == 0
    rows = {row["training set"]: row["test accuracy"] for row in result_of(out)["rows"]}
    assert rows["distilled, trained anew"] > 0.93
    assert rows["distilled, trained anew"] > rows["class means"] > rows["random images"]
    assert rows["distilled, trained anew"] == pytest.approx(rows["distilled, as it ran along"], abs=0.01)
    assert all(row.get("inner_gradient_norm", 0.0) < 1e-8 for row in runs.read_rows(out))
    # Another program: the two files, scikit-learn, and the scale that they tell.
    from sklearn.datasets import load_digits
    from sklearn.linear_model import LogisticRegression

    stored, told = load_file(out / "distilled.safetensors"), json.loads((out / "distilled.json").read_text())
    assert stored["images"].shape == (10, 1, 8, 8)
    assert stored["images"].dtype == torch.float32
    assert stored["labels"].tolist() == list(range(10))
    # Scikit-learn leaves the bias free; as one more input it is penalised as the recipe says.
    x = softmax.extended(stored["images"].double()).numpy()
    model = LogisticRegression(C=1 / (told["penalty"] * len(x)), fit_intercept=False, max_iter=5000, tol=1e-8)
    model.fit(x, stored["labels"].numpy())
    w, gradient_norm = distilled_set.train_on(out)
    assert gradient_norm < 1e-6
    assert torch.allclose(torch.from_numpy(model.coef_).double(), w, atol=2e-3)
    images, labels = load_digits(return_X_y=True)
    scaled = (torch.from_numpy(images) - told["mean"][0]) / told["deviation"][0]
    assert softmax.accuracy(w, scaled, torch.from_numpy(labels)) > 0.93


@pytest.mark.parametrize(
    "options",
    [
        ("--soft-labels",),
        ("--learned-rate", "--inner-steps", 5),
        pytest.param(("--learned-rate", "--soft-labels", "--per-class", 2), marks=pytest.mark.slow),
        pytest.param(("--per-class", 3, "--start", "noise", "--validation", 300), marks=pytest.mark.slow),
        ("--smoothness", 0.1, "--closeness", 0.1),
        ("--within-range", "--start", "black", "--pixel-rate", 0.5),
        ("--start", "mixtures", "--per-class", 2, "--within-range", "--pixel-rate", 0.5, "--closeness", 0.5),
        pytest.param(("--within-range", "--start", "noise", "--readers"), marks=pytest.mark.slow),
        pytest.param(("--start", "mixtures", "--readability", 0.1), marks=pytest.mark.slow),
    ],
    ids=["soft", "rate", "both", "several", "penalties", "range", "mixtures", "readers", "readability"],
)
@pytest.mark.filterwarnings("ignore:the linear solve ended")
def test_options_of_distillation(options, tmp_path, monkeypatch):
    if "--per-class" not in options:  # no other option has an effect on the comparisons
        monkeypatch.setattr(distill.Distill, "_comparisons", lambda *_: iter(()))
    out = tmp_path / "run"
    assert reproduce("distill", "--steps", 8, *options, "--out", out) == 0
    stored, told = load_file(out / "distilled.safetensors"), json.loads((out / "distilled.json").read_text())
    per_class = len(stored["images"]) // 10
    assert stored["labels"].shape == (
        (10 * per_class, 10) if "--soft-labels" in options else (10 * per_class,)
    )
    if "--learned-rate" in options:
        assert told["steps"] in (5, 20)
        assert told["rate"] != pytest.approx(0.1, rel=1e-3)
    anew = result_of(out)["rows"][0]["test accuracy"]
    w, _ = distilled_set.train_on(out)
    images = distill.data.load("digits")
    assert softmax.accuracy(w, images.x_test, images.y_test) == anew
    assert anew > 0.5
    least, most = images.x_train.min(), images.x_train.max()
    if "--within-range" in options:
        assert least <= stored["images"].min()
        assert stored["images"].max() <= most
    if "black" in options:  # where some pixels stay
        assert least == stored["images"].min()
    counts = [row["read"] for row in result_of(out)["rows"] if row.get("read") is not None]
    assert len(counts) == (2 if "--readers" in options else 0)
    assert all(0 <= count <= 10 for count in counts)


def test_the_exact_solver_agrees_with_training_from_zero():
    torch.manual_seed(0)
    x, y = torch.randn(12, 40, dtype=torch.float64), torch.arange(12) % 4
    for targets in (y, (2 * torch.randn(12, 4, dtype=torch.float64)).softmax(dim=1)):
        exact = softmax.ExactSoftmax(0.03)
        found = exact.solve(x, targets, 4)
        assert exact.gradient_norm < 1e-8
        again = exact.solve(x + 0.01, targets, 4)  # from the last solution, whose span is another
        fitted, gradient_norm = softmax.fit(x, targets, 4, 0.03, steps=2000)
        assert gradient_norm < 1e-7
        assert torch.allclose(found, fitted, atol=1e-6)
        assert torch.allclose(again, softmax.fit(x + 0.01, targets, 4, 0.03, steps=2000)[0], atol=1e-6)


def _equal_to_differences(problem, penalty, val):
    """Compare the exact hypergradient with differences of the validation loss of classifiers solved anew."""
    exact = softmax.ExactSoftmax(penalty)
    exact(problem, None)
    h = br.hypergradient(problem, None, val, br.Implicit(br.Exact()))
    # The solved gradient is below 1e-9, not zero: only a large step, of a formula of fourth order, is far from that.
    step = 0.02
    for name, parameter in problem.hyperparameters.items():
        direction, difference = torch.randn_like(parameter), 0.0
        for shift, factor in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
            kept = parameter.detach().clone()
            with torch.no_grad():
                parameter.add_(shift * step * direction)
                exact(problem, None)
                difference += (
                    factor * problem.val_loss(problem.model, problem.hyper, val).item() / (12 * step)
                )
                parameter.copy_(kept)
        assert float((h.total[name] * direction).sum()) == pytest.approx(difference, rel=1e-3)


def test_hypergradients_of_distilled_data_equal_differences_of_solved_problems():
    torch.manual_seed(0)
    x, y = torch.randn(6, 8, dtype=torch.float64), torch.arange(6) % 3
    val = torch.randn(20, 8, dtype=torch.float64), torch.randint(3, (20,))
    data = br.hyperparameters.DistilledData(x, y, classes=3)
    model = nn.Linear(8, 3).double()

    def train_loss(model, data, batch):
        inputs, targets = data()
        return F.cross_entropy(model(inputs), targets) + 0.025 * sum(
            w.square().sum() for w in model.parameters()
        )

    def val_loss(model, data, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    problem = br.Problem(model, data, train_loss, val_loss)
    _equal_to_differences(problem, 0.05, val)


def test_distilled_data_begins_as_it_is_told_and_refuses_what_does_not_fit():
    x, y = torch.randn(4, 1, 3, 3), torch.tensor([0, 1, 2, 1])
    hard = br.hyperparameters.DistilledData(x, y)
    assert torch.equal(hard()[0], x)
    assert torch.equal(hard()[1], y)
    assert [name for name, _ in hard.named_parameters()] == ["inputs"]
    soft = br.hyperparameters.DistilledData(x, y, classes=3, confidence=0.8)
    assert torch.allclose(soft()[1].gather(1, y[:, None]), torch.tensor(0.8))
    assert torch.allclose(soft()[1].sum(dim=1), torch.ones(4))
    with pytest.raises(br.Error, match="must be a tensor of floats"):
        br.hyperparameters.DistilledData(x.long(), y)
    with pytest.raises(br.Error, match="one int64 class for each example"):
        br.hyperparameters.DistilledData(x, y[:3])
    with pytest.raises(br.Error, match="labels must be a tensor; got list"):
        br.hyperparameters.DistilledData(x, [0, 1, 2, 1])
    with pytest.raises(br.Error, match="classes must be an integer"):
        br.hyperparameters.DistilledData(x, y, classes=3.0)
    with pytest.raises(br.Error, match="labels from 0 to classes - 1"):
        br.hyperparameters.DistilledData(x, y, classes=2)
    with pytest.raises(br.Error, match="1/classes < confidence < 1"):
        br.hyperparameters.DistilledData(x, y, classes=3, confidence=0.2)


def test_distilled_data_keeps_its_bounds():
    x, y = torch.rand(4, 2, 3, 3), torch.arange(4)
    data = br.hyperparameters.DistilledData(x, y, bounds=(0.0, torch.tensor([1.0, 2.0]).view(2, 1, 1)))
    data.project_()
    assert torch.equal(data()[0], x)
    with torch.no_grad():
        data.inputs.copy_(10 * x - 5)
    data.project_()
    assert float(data.inputs.detach().min()) == 0.0
    assert data.inputs.amax(dim=(0, 2, 3)).tolist() == [1.0, 2.0]
    free = br.hyperparameters.DistilledData(x, y)
    free.project_()
    assert torch.equal(free()[0], x)
    with pytest.raises(br.Error, match="inputs must be within the bounds"):
        br.hyperparameters.DistilledData(x, y, bounds=(0.9, 1.0))


def test_mixtures_are_means_of_the_images_of_their_class():
    torch.manual_seed(0)
    x, y = torch.rand(7, 2, 3, 3), torch.tensor([0, 1, 0, 1, 1, 0, 1])
    labels = torch.tensor([0, 0, 1, 1])
    mixtures = tuned_images.Mixtures(x, y, labels, seed=0)
    assert [list(w.shape) for w in mixtures.logits] == [[2, 3], [2, 4]]
    means = mixtures()
    assert means.shape == (4, 2, 3, 3)
    assert not torch.allclose(means[0], means[1])  # two images of a class begin apart
    with torch.no_grad():
        mixtures.logits[1].zero_()
        mixtures.logits[0][0] = torch.tensor([-100.0, 0.0, -100.0])
    assert torch.allclose(mixtures()[2], x[y == 1].mean(dim=0))
    assert torch.allclose(mixtures()[0], x[2])
    again = tuned_images.Mixtures(x, y, labels, seed=0)
    again.load_state_dict(mixtures.state_dict())  # the images themselves are not saved
    assert torch.equal(again(), mixtures())


def test_images_with_mixtures_stay_within_their_limits():
    torch.manual_seed(0)
    x, y = torch.rand(6, 2, 3, 3), torch.arange(6) % 3
    mixtures = tuned_images.Mixtures(x, y, torch.arange(3), seed=0)
    differences = br.hyperparameters.DistilledData(torch.randn(3, 2, 3, 3), torch.arange(3))
    limits = torch.zeros(2, 1, 1), torch.tensor([1.0, 0.5]).view(2, 1, 1)
    tuned = tuned_images.TunedImages(differences, 0.1, mixtures=mixtures, limits=limits)
    before = tuned()[0].detach().clone()
    tuned.project_()
    assert torch.allclose(tuned()[0], before.clamp(*limits), atol=1e-6)
    assert not torch.allclose(tuned()[0], before)


def test_hypergradients_of_mixtures_equal_differences_of_solved_problems():
    torch.manual_seed(0)
    bank, y = torch.randn(12, 1, 2, 4, dtype=torch.float64), torch.arange(12) % 3
    val = torch.randn(20, 8, dtype=torch.float64), torch.randint(3, (20,))
    differences = br.hyperparameters.DistilledData(0.1 * torch.randn(3, 1, 2, 4).double(), torch.arange(3))
    mixtures = tuned_images.Mixtures(bank, y, torch.arange(3), seed=0)
    tuned = tuned_images.TunedImages(differences, 0.05, mixtures=mixtures)
    config = distill.Distill(closeness=0.3, readability=0.2, smoothness=0.1)
    readers = [nn.Sequential(nn.Flatten(), nn.Linear(8, 3)).double().requires_grad_(False) for _ in range(2)]
    val_loss = partial(config._val_loss, readers)
    problem = br.Problem(nn.Linear(8, 3).double(), tuned, distill._train_loss, val_loss)
    _equal_to_differences(problem, 0.05, val)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("mnist", 0.92), ("cifar10", 0.36)])
def test_ten_images_teach_what_is_asked_of_them(name, least, tmp_path, data_folder):
    out = tmp_path / "run"
    assert (
        reproduce("distill", "--preset", "cpu", "--data", name, "--data-dir", data_folder, "--out", out) == 0
    )
    assert result_of(out)["headline"]["test accuracy"] >= least


def interrupted(monkeypatch, at, run):
    """A run that is interrupted at the end of a hyper-step, before it could be saved."""

    def stop(self, tuner):
        if tuner.hyper_step == at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(br.callbacks.Checkpoint, "__call__", stop)
        return run()


def test_a_row_that_was_stopped_before_it_was_saved_has_no_row_twice(tmp_path, monkeypatch):
    def run():
        return reproduce("augment", *SMALL["augment"], "--rows", "identity", "--out", tmp_path)

    assert interrupted(monkeypatch, 3, run) == 130
    assert len(runs.read_rows(tmp_path / "identity-0")) == 3
    assert run() == 0
    assert [row["hyper_step"] for row in runs.read_rows(tmp_path / "identity-0")] == [1, 2, 3, 4]


def test_a_row_of_other_options_is_run_anew_even_where_those_were_stopped(tmp_path, monkeypatch):
    def run(*options):
        return reproduce("augment", *SMALL["augment"], "--rows", "identity", *options, "--out", tmp_path)

    assert run() == 0
    first, rows = numbers_of(tmp_path), runs.read_rows(tmp_path / "identity-0")
    assert interrupted(monkeypatch, 2, lambda: run("--hyper-rate", 0.3)) == 130
    assert run() == 0
    assert numbers_of(tmp_path) == first
    again = runs.read_rows(tmp_path / "identity-0")
    assert [r["val_loss"] for r in again] == [r["val_loss"] for r in rows]
