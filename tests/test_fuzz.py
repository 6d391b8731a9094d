"""Malformed arguments, configurations and command lines: an answer or one of the library's own errors."""

import contextlib
import math
import warnings

import pytest
import torch

import bestresponse as br
from bestresponse import cli
from bestresponse.hyperparameters import WeightDecay
from bestresponse.runs import callbacks

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import fuzzing  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

COMMON = {
    "deadline": None,
    "database": None,
    "print_blob": True,
    "suppress_health_check": list(HealthCheck),
}
FAST = settings(**COMMON, max_examples=30, derandomize=True)
LONG = settings(**COMMON, max_examples=1000)

NAMES = sorted(set(fuzzing.targets(fuzzing.Path())) - {"diagnostics.check"})


def accepted(call):
    """Whether a call gave an answer; an error that is not the library's own, nor the caller's, is raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        if fuzzing.foreign(error):
            raise
        return False
    return True


@st.composite
def malformed(draw):
    """The name of a target, and up to three of its arguments with odd values."""
    name = draw(st.sampled_from(NAMES))
    known = list(fuzzing.targets(fuzzing.Path())[name].arguments) or ["problem", "weight_optimizer", "method"]
    some = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
    odd = {argument: draw(st.sampled_from(sorted(fuzzing.ODD))) for argument in some}
    return name, {k: v for k, v in odd.items() if not (k in fuzzing.COUNTS and v == "a very large number")}


def check_malformed(case, folder):
    name, odd = case
    target = fuzzing.targets(folder)[name]
    with contextlib.chdir(folder):  # an odd value may be a path
        accepted(lambda: target.run({argument: fuzzing.ODD[value] for argument, value in odd.items()}))


def test_targets_accept_their_own_arguments(tmp_path):
    """Otherwise nothing would be tested of them."""
    for name in NAMES:
        target = fuzzing.targets(tmp_path)[name]
        assert accepted(lambda target=target: target.run({})) or name == "Tuner.load", name


NUMBERS = st.one_of(
    st.sampled_from([0.0, -1.0, 1e-300, 1e300, math.nan, math.inf]), st.floats(1e-4, 2.0), st.integers(-3, 5)
)
COUNT = st.integers(-1, 3)
SOLVERS = st.one_of(
    st.builds(lambda *x: lambda: br.Neumann(*x), COUNT, st.none() | NUMBERS, st.booleans()),
    st.builds(
        lambda a, b, c, d, e: lambda: br.ConjugateGradient(a, b, c, d, e),
        COUNT,
        NUMBERS,
        st.none() | NUMBERS,
        COUNT,
        st.booleans(),
    ),
    st.builds(lambda *x: lambda: br.MINRES(*x), COUNT, NUMBERS, NUMBERS),
    st.builds(lambda *x: lambda: br.solvers.GMRES(*x), COUNT, NUMBERS, NUMBERS),
    st.builds(lambda *x: lambda: br.Nystrom(*x), COUNT, NUMBERS),
    st.builds(lambda *x: lambda: br.Exact(*x), NUMBERS),
    st.builds(lambda *x: lambda: br.solvers.SOBA(*x), COUNT, st.none() | NUMBERS, NUMBERS, st.booleans()),
    st.just(br.Identity),
)
CURVATURES = st.sampled_from(
    [
        br.Hessian,
        br.FiniteDifference,
        lambda: br.GaussNewton(fuzzing.predict, fuzzing.fit, fuzzing.rest),
        lambda: br.KFAC(fuzzing.predict, fuzzing.fit, fuzzing.rest),
    ]
)
METHODS = st.one_of(
    st.builds(
        lambda solver, curvature, warm: lambda: br.Implicit(solver(), curvature(), warm),
        SOLVERS,
        CURVATURES,
        st.sampled_from([None, True, False]),
    ),
    st.builds(lambda *x: lambda: br.Unrolled(*x), COUNT, NUMBERS, st.none() | COUNT),
    st.builds(lambda *x: lambda: br.Forward(*x), COUNT, NUMBERS),
    st.builds(lambda *x: lambda: br.Penalty(*x), COUNT, NUMBERS, NUMBERS),
    st.sampled_from([br.SAMA, br.Direct]),
)
CALLBACKS = st.lists(
    st.sampled_from(
        [
            lambda: callbacks.KeepBest(),
            lambda: callbacks.EarlyStopping(patience=1),
            lambda: callbacks.Evaluate(lambda m, h: {"x": 1.0}),
            lambda: callbacks.StopAtNoise(0.1, 1),
        ]
    ),
    max_size=2,
)
BATCHES = st.sampled_from(["good", "nan", "several", "empty", "inference", "half", "other"])
TUNERS = st.fixed_dictionaries(
    {
        "weight_steps": st.integers(0, 2),
        "warmup_steps": st.integers(-1, 2),
        "clip_weights": st.none() | NUMBERS,
        "clip_hypergradient": st.none() | NUMBERS,
        "policy": st.sampled_from(["warn", "raise", "skip", "return", "stop"]),
        "max_rise": st.none() | NUMBERS,
        "seed": st.integers(),
    }
)


def batch(kind):
    x, y = fuzzing.batch()
    if kind == "nan":
        return x * math.nan, y
    if kind == "several":
        return br.Batches([(x, y), (x[:2], y[:2])], weights=[6, 2])
    if kind == "empty":
        return x[:0], y[:0]
    if kind == "inference":
        with torch.inference_mode():
            return x + 0, y + 0
    return (x.half(), y) if kind == "half" else (x[:, :1], y) if kind == "other" else (x, y)


def check_configuration(method, more, arguments, train, val, per):
    """A whole run."""

    def call():
        net = fuzzing.model()
        hyper = WeightDecay(net, per=per, initial=0.01)
        problem = br.Problem(net, hyper, fuzzing.train_loss, fuzzing.val_loss)
        weights = torch.optim.Adam(problem.weights.values(), 0.1)
        optimizer = torch.optim.SGD(problem.hyperparameters.values(), 0.1)
        made = [one() for one in more]
        tuner = br.Tuner(problem, weights, optimizer, method(), callbacks=made, **arguments)
        tuner.fit([batch("good"), batch(train)], [batch("good"), batch(val)], 3)

    accepted(call)


CONFIGURATION = {
    "method": METHODS,
    "more": CALLBACKS,
    "arguments": TUNERS,
    "train": BATCHES,
    "val": BATCHES,
    "per": st.sampled_from(["global", "tensor", "unit", "input", "weight"]),
}
OPTIONS = (
    "--seed",
    "--out",
    "--device",
    "--threads",
    "--steps",
    "--preset",
    "--data-dir",
    "--seeds",
    "--folder",
)
VALUES = (
    "0",
    "-1",
    "1.5",
    "nan",
    "meta",
    "cuda:99",
    "cpu",
    "smoke",
    "99999999999999999999999",
    "./x",
    "x:y",
    "a.b:c",
)
WORDS = st.lists(
    st.one_of(
        st.sampled_from(
            ["reproduce", "plot", "check", "split", "overfit", "shapes", "--version", "--help", "--"]
        ),
        st.sampled_from(OPTIONS),
        st.sampled_from(VALUES),
        st.sampled_from(
            ["", "--out=", "--seed=", "--seed=x", "--device=meta", "--threads=10000000000000000000"]
        ),
        st.text(max_size=5),
    ),
    max_size=6,
)


class Stop(Exception):
    """A command line that would run an experiment."""


def check_command(words, monkeypatch, folder, capsys):
    experiments = pytest.importorskip("bestresponse.experiments.catalogue").EXPERIMENTS
    monkeypatch.chdir(folder)
    threads = torch.get_num_threads()
    for kind in experiments.values():
        monkeypatch.setattr(kind, "tasks", stopped, raising=False)
    with contextlib.suppress(SystemExit, Stop):
        accepted_command = cli.main(words)
        assert accepted_command in (0, 1, 2, 130)
    torch.set_num_threads(threads)
    capsys.readouterr()


def stopped(*args):
    raise Stop


@FAST
@given(case=malformed())
def test_malformed_arguments(case, tmp_path_factory):
    check_malformed(case, tmp_path_factory.mktemp("fuzz"))


@FAST
@given(**CONFIGURATION)
def test_configurations(**configuration):
    check_configuration(**configuration)


@settings(FAST, max_examples=3)
@given(words=WORDS)
def test_command_lines(words, monkeypatch, tmp_path, capsys):
    check_command(words, monkeypatch, tmp_path, capsys)


@pytest.mark.slow
@LONG
@given(case=malformed())
def test_many_malformed_arguments(case, tmp_path_factory):
    check_malformed(case, tmp_path_factory.mktemp("fuzz"))


@pytest.mark.slow
@settings(LONG, max_examples=300)
@given(**CONFIGURATION)
def test_many_configurations(**configuration):
    check_configuration(**configuration)


@pytest.mark.slow
@settings(LONG, max_examples=100)
@given(words=WORDS)
def test_many_command_lines(words, monkeypatch, tmp_path, capsys):
    check_command(words, monkeypatch, tmp_path, capsys)


@pytest.mark.parametrize(
    "words",
    [
        "--device meta",
        "--seed 99999999999999999999999",
        "--threads 10000000000000000000",
        "--out=",
        ["--out", ""],
    ],
)
def test_bad_options_are_named(words, monkeypatch, tmp_path, capsys):
    pytest.importorskip("tyro")
    monkeypatch.chdir(tmp_path)
    words = words.split() if isinstance(words, str) else words
    assert cli.main(["reproduce", "split", *words]) == 1
    assert "bestresponse: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_batch_of_inference_mode_is_named():
    tuner = fuzzing.tuner()
    with pytest.raises(br.Error, match=r"made in torch.inference_mode"):
        tuner.fit([batch("inference")], [batch("good")], 1)
    with pytest.raises(br.Error, match=r"made in torch.inference_mode"):
        br.hypergradient(fuzzing.problem(), batch("inference"), batch("good"), br.Implicit())
