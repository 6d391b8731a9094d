import copy
import json
import math
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

import bestresponse as br
from bestresponse import _optuna, search
from bestresponse.errors import EvaluationError, SecondDerivativeError
from bestresponse.hyperparameters import DistilledData, WeightDecay
from bestresponse.passes import random_state

optuna = pytest.importorskip("optuna")

SPACE = {"signal": (-8.0, 4.0), "noise": (-8.0, 4.0)}
SQUARE = {"x": (0.0, 1.0), "y": (0.0, 1.0)}
torch.manual_seed(3)
TRUTH = torch.cat([torch.randn(5), torch.zeros(5)]).double()
X, X_VAL = torch.randn(20, 10).double(), torch.randn(60, 10).double()
Y, Y_VAL = X @ TRUTH + torch.randn(20).double(), X_VAL @ TRUTH + torch.randn(60).double()


class Split(nn.Module):
    """Linear regression with the useful and the useless inputs apart."""

    def __init__(self):
        super().__init__()
        self.signal, self.noise = nn.Linear(5, 1, bias=False), nn.Linear(5, 1, bias=False)

    def forward(self, x):
        return self.signal(x[:, :5])[:, 0] + self.noise(x[:, 5:])[:, 0]


def squares(model, hyper, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def make(per="tensor"):
    model = Split()
    decay = WeightDecay(model, per, minimum=math.exp(-8), maximum=math.exp(4), initial=1.0)
    return br.Problem(model, decay, lambda m, h, b: squares(m, h, b) + h(m), squares)


def solution(decays):
    """The minimum of mean squares + ½ Σ decay w²."""
    return torch.linalg.solve(2 * X.T @ X / len(X) + torch.diag(decays), 2 * X.T @ Y / len(X))


def loss_at(values):
    decays = torch.tensor([math.exp(values[name]) for name in ("signal", "noise") for _ in range(5)])
    return float((X_VAL @ solution(decays) - Y_VAL).square().mean())


@torch.no_grad()
def solve(problem):
    rates = problem.hyperparameters.values()
    w = solution(torch.cat([rate.exp().expand(1, 5)[0] for rate in rates]))
    problem.model.signal.weight.copy_(w[:5].view(1, 5))
    problem.model.noise.weight.copy_(w[5:].view(1, 5))
    return problem.val_loss(problem.model, problem.hyper, (X_VAL, Y_VAL))


def best_of_a_fine_grid():
    ticks = torch.linspace(-8, 4, 61).tolist()
    losses = sorted(loss_at({"signal": a, "noise": b}) for a in ticks for b in ticks)
    return losses[0], losses[len(losses) // 2]


def values_of(result):
    return [row["values"] for row in result.trials]


# --- The four samplers.


@pytest.mark.parametrize(
    ("sampler", "trials", "nearest", "late"),
    [
        ("grid", 49, 0.005, math.inf),
        ("random", 60, 0.2, math.inf),
        ("tpe", 60, 0.03, 0.7),
        ("gp", 25, 0.002, 0.2),
    ],
)
def test_samplers_come_near_the_best_of_a_fine_grid(sampler, trials, nearest, late):
    result = search(loss_at, SPACE, sampler=sampler, trials=trials)
    best, median = best_of_a_fine_grid()
    shares = [(row["loss"] - best) / (median - best) for row in result.trials]
    assert -0.002 < min(shares) < nearest
    assert sorted(shares[-10:])[5] < late  # what learns from its trials leaves the bad ones behind
    assert result.loss == pytest.approx(loss_at(result.values))
    assert result.loss == min(row["loss"] for row in result.trials) == result.study.best_value
    assert len(result.trials) == trials
    for name in SPACE:
        tried = [values[name] for values in values_of(result)]
        assert -8 <= min(tried) < -5 < 1 < max(tried) <= 4
    assert [row["trial"] for row in result.trials] == list(range(trials))
    assert 0 < result.trials[0]["seconds"] < result.trials[-1]["seconds"]
    assert str(result).startswith("SearchResult(values=")


def test_a_grid_goes_from_end_to_end_on_the_scale_of_the_parameter():
    space = {
        "rate": optuna.distributions.FloatDistribution(1e-4, 1.0, log=True),
        "depth": optuna.distributions.IntDistribution(1, 2),
        "size": optuna.distributions.IntDistribution(8, 128, log=True),
        "share": (0, 2),
        "step": optuna.distributions.FloatDistribution(0, 0.75, step=0.25),
    }
    result = search(lambda v: v["rate"] * v["depth"], space, sampler="grid", points=3)
    tried = {name: sorted({values[name] for values in values_of(result)}) for name in space}
    assert tried == {
        "rate": [1e-4, pytest.approx(1e-2), 1.0],
        "depth": [1, 2],
        "size": [8, 32, 128],
        "share": [0, 1, 2],
        "step": [0, 0.5, 0.75],
    }
    assert len({json.dumps(v, sort_keys=True) for v in values_of(result)}) == len(result.trials) == 2 * 3**4
    assert isinstance(result.values["depth"], int)


def test_a_grid_has_as_many_points_as_the_trials_allow():
    assert len(search(lambda v: v["x"], SQUARE, sampler="grid", trials=30).trials) == 25
    assert len(search(lambda v: v["x"], {"x": (0, 1)}, sampler="grid", trials=7).trials) == 7
    with pytest.raises(br.Error, match="trials must be ≥ 4 for a grid over 2 hyperparameters; got 3"):
        search(lambda v: v["x"], SQUARE, sampler="grid", trials=3)


def test_a_sampler_of_optunas_is_taken_as_it_is():
    quasi = optuna.samplers.RandomSampler(seed=5)
    result = search(lambda v: v["x"], SQUARE, sampler=quasi, trials=4)
    expected = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=5))
    expected.optimize(lambda t: t.suggest_float("x", 0, 1) + 0 * t.suggest_float("y", 0, 1), n_trials=4)
    assert values_of(result) == [t.params for t in expected.trials]
    grid = optuna.samplers.GridSampler({"x": [0.0, 0.5, 1.0], "y": [0.5]})
    assert len(search(lambda v: v["x"], SQUARE, sampler=grid, trials=10).trials) == 3


# --- Hyperparameters of a problem.


def test_declared_ranges_of_a_problem_are_searched():
    result = search(solve, problem=make, sampler="tpe", trials=40)
    names = {"log_decay.signal.weight", "log_decay.noise.weight"}
    assert all(values.keys() == names for values in values_of(result))
    best, median = best_of_a_fine_grid()
    assert (result.loss - best) / (median - best) < 0.05
    problem = make()
    result.write_(problem)
    assert float(solve(problem)) == pytest.approx(result.loss)
    assert problem.hyperparameters["log_decay.noise.weight"].item() == result.values["log_decay.noise.weight"]


def test_entries_of_a_tensor_are_declared_one_by_one():
    result = search(solve, problem=lambda: make("weight"), sampler="random", trials=5)
    assert len(result.values) == 10
    assert len(set(result.values.values())) == 10
    problem = make("weight")
    result.write_(problem)
    rates = problem.hyperparameters["log_decay.noise.weight"]
    assert rates[0].tolist() == [result.values[f"log_decay.noise.weight[0,{i}]"] for i in range(5)]


def test_a_name_stands_for_a_tensor_or_an_entry_and_the_rest_stays():
    space = {"log_decay.signal.weight": (-3, -2), "log_decay.noise.weight[0,1]": (1, 2)}
    seen = []

    def objective(problem):
        seen.append({n: p.detach().clone() for n, p in problem.hyperparameters.items()})
        return solve(problem)

    result = search(objective, space, problem=lambda: make("weight"), sampler="random", trials=3)
    for rates, values in zip(seen, values_of(result), strict=True):
        assert rates["log_decay.signal.weight"].tolist() == [[values["log_decay.signal.weight"]] * 5]
        assert rates["log_decay.noise.weight"].tolist() == [
            [0, values["log_decay.noise.weight[0,1]"], 0, 0, 0]
        ]


def test_a_row_of_a_tensor_shares_one_value():
    space = {"log_decay.noise.weight[0]": (1, 2)}
    seen = []

    def objective(problem):
        seen.append(problem.hyperparameters["log_decay.noise.weight"].tolist())
        return solve(problem)

    result = search(objective, space, problem=lambda: make("weight"), sampler="random", trials=2)
    assert seen == [
        [[pytest.approx(values["log_decay.noise.weight[0]"])] * 5] for values in values_of(result)
    ]


class Nested(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = nn.ModuleDict({"decay": WeightDecay(model, "tensor")})
        self.shift = nn.Parameter(torch.zeros(2))

    def ranges(self):
        return {"shift": (-1.0, 1.0), "inner.decay.log_decay.noise.weight": (0.0, 0.5)}


def nested(kind=Nested):
    model = Split()
    return br.Problem(model, kind(model), squares, squares)


def test_modules_nest_and_the_outer_one_has_the_last_word():
    result = search(lambda p: p.hyper.shift.sum(), problem=nested, sampler="random", trials=20)
    tried = {name: [values[name] for values in values_of(result)] for name in result.values}
    assert tried.keys() == {
        "inner.decay.log_decay.signal.weight",
        "inner.decay.log_decay.noise.weight",
        "shift[0]",
        "shift[1]",
    }
    assert all(0 <= x <= 0.5 for x in tried["inner.decay.log_decay.noise.weight"])
    assert min(tried["inner.decay.log_decay.signal.weight"]) < -5
    assert any(x < -0.5 for x in tried["shift[1]"])


class Undeclared(Nested):
    ranges = None


class Misnamed(Nested):
    def ranges(self):
        return {"shfit": (0, 1)}


def distilled():
    data = DistilledData(torch.zeros(3, 2), torch.tensor([0, 1, 2]))
    return br.Problem(nn.Linear(2, 3), data, squares, squares)


@pytest.mark.parametrize(
    ("factory", "space", "words"),
    [
        (lambda: nested(Undeclared), None, r"\['shift'\] declare none"),
        (lambda: nested(Misnamed), None, "Misnamed.ranges must use the names.* got 'shfit'"),
        (distilled, None, r"\['inputs'\] declare none"),
        (
            lambda: br.Problem(nn.Linear(8, 8), WeightDecay(nn.Linear(8, 8)), squares, squares),
            None,
            "has 72. Tune",
        ),
        (make, {"log_decay.nois.weight": (0, 1)}, "got 'log_decay.nois.weight'. The problem has"),
        (make, {"log_decay.noise.weight[0]": (0, 1)}, r"has the shapes .*'log_decay.noise.weight': \[\]"),
        (nested, {"shift[2]": (0, 1)}, r"has the shapes .'shift': \[2\]"),
        (nested, {"shift": (0, 1), "shift[1]": (0, 1)}, r"'shift\[1\]' has one that another"),
        (make(), None, "problem must be a function that makes a br.Problem"),
        (lambda: Split(), None, "must return a br.Problem; got Split"),
    ],
)
def test_bad_problems(factory, space, words):
    with pytest.raises(br.Error, match=words):
        search(solve, space, problem=factory, trials=2)


def test_a_problem_that_is_not_new_is_refused():
    problem, model = make(), Split()
    same = "must make a new model and hyper"
    with pytest.raises(br.Error, match=same):
        search(solve, problem=lambda: problem, trials=2)
    with pytest.raises(br.Error, match=same):
        search(
            solve, problem=lambda: br.Problem(model, WeightDecay(model, "tensor"), squares, squares), trials=2
        )


def test_trials_differ_in_their_values_alone_and_leave_everything_as_it_was():
    first = make()
    before = copy.deepcopy([first.model.state_dict(), first.hyper.state_dict()])
    space = {"log_decay.signal.weight": (-1, 1)}
    drawn = []

    def factory():
        return br.Problem(
            copy.deepcopy(first.model), copy.deepcopy(first.hyper), first.train_loss, first.val_loss
        )

    def objective(problem):
        drawn.append((float(torch.rand(())), random.random()))
        return solve(problem)

    for seed in (0, 0, 1):
        search(objective, space, problem=factory, trials=2, seed=seed)
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3] != drawn[4] == drawn[5]
    after = [first.model.state_dict(), first.hyper.state_dict()]
    assert all(torch.equal(x, b[n]) for a, b in zip(before, after, strict=True) for n, x in a.items())
    assert space == {"log_decay.signal.weight": (-1, 1)}


def test_the_tuner_runs_inside_a_trial():
    moved = []

    def objective(problem):
        start = {n: p.item() for n, p in problem.hyperparameters.items()}
        tuner = br.Tuner(
            problem,
            lambda problem, batch: solve(problem) and None,
            torch.optim.Adam(problem.hyperparameters.values(), 0.5),
            br.Implicit(br.Exact()),
        )
        tuner.fit([(X, Y)], [(X_VAL, Y_VAL)], 25)
        moved.append([abs(p.item() - start[n]) for n, p in problem.hyperparameters.items()])
        return solve(problem)

    tuned = search(objective, problem=make, sampler="random", trials=3)
    plain = search(solve, problem=make, sampler="random", trials=3)
    assert values_of(tuned) == values_of(plain)
    assert all(sum(each) > 1 for each in moved)
    assert all(a["loss"] < b["loss"] for a, b in zip(tuned.trials, plain.trials, strict=True))


# --- Seeds.


@pytest.mark.parametrize("sampler", ["grid", "random", "tpe", "gp"])
def test_a_search_is_deterministic_and_leaves_the_random_state_alone(sampler):
    np = pytest.importorskip("numpy")
    torch.manual_seed(1), random.seed(2), np.random.seed(3)
    verbosity = optuna.logging.get_verbosity()
    before = random_state.snapshot()
    runs = [search(loss_at, SPACE, sampler=sampler, trials=12, seed=seed) for seed in (7, 7, 8)]
    after = random_state.snapshot()
    assert torch.equal(before[0][1], after[0][1])
    assert before[1] == after[1]
    assert (before[2][1][1] == after[2][1][1]).all()
    assert before[2][1][2:] == after[2][1][2:]
    assert values_of(runs[0]) == values_of(runs[1]) != values_of(runs[2])
    assert optuna.logging.get_verbosity() == verbosity


def test_it_says_nothing(capfd):
    search(lambda v: v["x"], SQUARE, trials=3)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


# --- Failures.


def cliff(values):
    """The best lies just before the edge beyond which training diverges."""
    if values["x"] > 0.7:
        return math.nan
    return (values["x"] - 0.65) ** 2 + (values["y"] - 0.3) ** 2 - 0.5 * values["x"]


@pytest.mark.filterwarnings("ignore:trial .* of search failed")
@pytest.mark.parametrize("sampler", ["tpe", "gp"])
def test_samplers_learn_from_trials_that_fail(sampler):
    result = search(cliff, SQUARE, sampler=sampler, trials=18)
    late = [row["loss"] for row in result.trials[10:]]
    assert sum(map(math.isfinite, late)) >= 4  # with Optuna's failed trials, a Gaussian process has none


def test_a_failed_trial_is_told_and_the_search_goes_on():
    losses = iter(
        [3.0, math.nan, math.inf, EvaluationError("the loss exploded"), torch.tensor(1.0), -math.inf]
    )

    def objective(values):
        loss = next(losses)
        if isinstance(loss, Exception):
            raise loss
        return loss

    with pytest.warns(br.BestResponseWarning, match="trial . of search failed at {.x.: .*}: ") as told:
        result = search(objective, SQUARE, trials=6)
    assert [row["loss"] for row in result.trials] == [3, math.inf, math.inf, math.inf, 1, math.inf]
    failures = [row["failure"] for row in result.trials]
    assert failures == [
        None,
        "the loss is nan",
        "the loss is inf",
        "the loss exploded",
        None,
        "the loss is -inf",
    ]
    assert len(told) == 4
    assert result.loss == 1
    assert result.values == result.trials[4]["values"]


@pytest.mark.filterwarnings("ignore:trial .* of search failed")
def test_a_search_in_which_every_trial_failed_raises():
    with pytest.raises(EvaluationError, match="all 3 failed, the first at .*: the loss is nan"):
        search(lambda values: math.nan, SQUARE, trials=3)


@pytest.mark.parametrize("error", [ZeroDivisionError(), SecondDerivativeError("none"), KeyboardInterrupt()])
def test_any_other_exception_ends_the_search_which_can_go_on(error):
    place = optuna.storages.InMemoryStorage()
    tried = []

    def objective(values, broken=True):
        tried.append(values)
        if broken and len(tried) == 3:
            raise error
        return values["x"]

    before = torch.get_rng_state()
    with pytest.raises(type(error)):
        search(objective, SQUARE, sampler="random", trials=5, storage=place)
    assert torch.equal(before, torch.get_rng_state())
    states = [t.state.name for t in optuna.load_study(study_name="search", storage=place).trials]
    assert states == ["COMPLETE", "COMPLETE", "FAIL", "WAITING"]
    result = search(lambda v: objective(v, False), SQUARE, sampler="random", trials=5, storage=place)
    assert values_of(result) == tried[:2] + tried[3:]
    assert tried[3] == tried[2]
    # Those after it are what they would have been.
    whole = search(lambda v: v["x"], SQUARE, sampler="random", trials=5)
    assert values_of(result) == values_of(whole)


def test_an_objective_without_a_number_is_an_error():
    with pytest.raises(br.Error, match="search.objective returns must be a number; got None"):
        search(lambda values: None, SQUARE, trials=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"objective": 3}, "objective must be a function"),
        ({"space": None}, "space must be a dict with a range by name"),
        ({"space": {}}, "space must be a dict with a range by name"),
        ({"space": [("x", 0, 1)]}, "space must be a dict with a range by name"),
        ({"space": {"x": 3}}, r"space\['x'\] must be \(lowest, highest\)"),
        ({"space": {"x": (1, 0)}}, "finite and in this order"),
        ({"space": {"x": (0, math.inf)}}, "finite and in this order"),
        ({"sampler": "bayes"}, 'must be "grid", "random"'),
        ({"points": 3}, 'None except with sampler="grid"'),
        ({"trials": 0}, "trials must be an integer ≥ 1"),
        ({"seconds": 0}, "seconds must be positive"),
        ({"seconds": 1e-9}, "the time was over before"),
        ({"storage": 3}, "must be None, a file, a database's URL"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(br.Error, match=words):
        search(**{"objective": lambda v: v["x"], "space": SQUARE, "trials": 4, **arguments})


@pytest.mark.parametrize(("package", "sampler"), [("optuna", "tpe"), ("scipy", "gp")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, package, sampler):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        br.Error, match=rf"needs the package '{package}'.*pip install 'bestresponse\[search\]'"
    ) as told:
        search(loss_at, SPACE, sampler=sampler)
    assert isinstance(told.value, ImportError)


def test_a_time_limit_ends_a_search():
    began = time.perf_counter()
    result = search(lambda v: time.sleep(0.05) or v["x"], SQUARE, sampler="random", trials=1000, seconds=0.5)
    assert time.perf_counter() - began > 0.5
    assert 1 <= len(result.trials) <= 10


# --- Storage: runs that go on, and processes that share a study.


def test_a_search_goes_on_where_it_stopped(tmp_path):
    place = tmp_path / "new" / "search.db"
    once = search(loss_at, SPACE, sampler="tpe", trials=12)
    search(loss_at, SPACE, sampler="tpe", trials=5, storage=place)
    result = search(loss_at, SPACE, sampler="tpe", trials=12, storage=str(place))
    assert values_of(result) == values_of(once)
    assert [row["seconds"] for row in result.trials] == sorted(row["seconds"] for row in result.trials)
    again = search(lambda values: pytest.fail("one more"), SPACE, trials=12, storage=f"sqlite:///{place}")
    assert again.values == result.values
    assert len(search(loss_at, SPACE, trials=3, storage=place, name="another").trials) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"space": {"x": (0, 1), "y": (0, 2)}}, "must have begun with the same space and grid"),
        ({"space": {"x": (0, 1)}}, "must have begun with the same space and grid"),
        ({"points": 3}, "must have begun with the same space and grid"),
        ({"seed": 1}, "must have begun with the same space and grid"),
        ({"sampler": "tpe"}, "must have begun with the same space and grid"),
        ({"name": "maximised"}, "the study 'maximised'"),
        ({"name": "foreign"}, "the study 'foreign'"),
    ],
)
def test_going_on_with_another_search_is_an_error(change, words):
    place = optuna.storages.InMemoryStorage()
    with_grid = {"space": SQUARE, "sampler": "grid", "trials": 4, "storage": place}
    search(lambda v: v["x"], **with_grid)
    optuna.create_study(storage=place, study_name="maximised", direction="maximize")
    optuna.create_study(storage=place, study_name="foreign").add_trial(optuna.create_trial(value=1.0))
    with pytest.raises(br.Error, match=words):
        search(lambda v: v["x"], **with_grid | change)


PROGRAM = """
import json, os, sys, time
import bestresponse as br

folder, (together, trials, stop_at) = sys.argv[1], map(int, sys.argv[2:])
open(f"{folder}/ready-{os.getpid()}", "w").close()
while sum(name.startswith("ready") for name in os.listdir(folder)) < together:
    time.sleep(0.01)

def objective(values):
    mine.append(values)
    if len(mine) == stop_at:
        with open(f"{folder}/part", "w") as file:
            json.dump(values, file)
        os.rename(file.name, f"{folder}/killed")
        time.sleep(1e6)
    time.sleep(0.03)
    return (values["x"] - 0.4) ** 2 + values["y"]

for sampler in ("grid", "random"):
    mine = []
    options = {"sampler": sampler, "name": sampler, "trials": trials, "storage": f"{folder}/search.db"}
    result = br.search(objective, {"x": (0, 1), "y": (0, 1)}, **options)
    print(json.dumps([mine, [row["values"] for row in result.trials]]))
"""


def begin(folder, together, trials, stop_at):
    words = [sys.executable, "-W", "error", "-c", PROGRAM, folder, together, trials, stop_at]
    return subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, text=True)


def beats_of_the_seventh(folder):
    """Whether the seventh trial has a heartbeat, which a thread of its process writes."""
    with closing(sqlite3.connect(folder / "search.db")) as database:
        (number,) = database.execute("SELECT COUNT(*) FROM trial_heartbeats WHERE trial_id = 7").fetchone()
    return number == 1


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a search over a grid of nine points that was killed in its seventh trial, and its values."""
    folder = tmp_path_factory.mktemp("killed")
    process = begin(folder, 1, 9, 7)
    while not ((folder / "killed").exists() and beats_of_the_seventh(folder)):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.communicate()
    return folder, json.loads((folder / "killed").read_text())


def copied(folder, to, seconds):
    """A copy of the killed search's folder, whose last heartbeat was ``seconds`` ago."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    with closing(sqlite3.connect(to / "search.db")) as database, database:
        beats = database.execute(
            "UPDATE trial_heartbeats SET heartbeat = datetime('now', ?) WHERE trial_id = 7",
            [f"-{seconds} seconds"],
        )
        assert beats.rowcount == 1
    return to


def go_on(folder):
    tried = []
    options = {"sampler": "grid", "name": "grid", "trials": 9, "storage": folder / "search.db"}
    result = search(lambda v: tried.append(v) or v["x"], SQUARE, **options)
    assert len(tried) == 3
    assert len(result.trials) == len({tuple(v.items()) for v in values_of(result)}) == 9
    return tried, [trial.state.name for trial in result.study.trials]


def test_a_killed_trial_is_repeated_first_after_its_heartbeat_has_stopped_for_long(killed, tmp_path):
    folder, values = killed
    tried, states = go_on(copied(folder, tmp_path, _optuna.GRACE + 5))
    assert tried[0] == values
    assert (states.count("FAIL"), states.count("RUNNING")) == (1, 0)


def test_a_grid_that_was_killed_is_completed_at_once(killed, tmp_path):
    folder, values = killed
    tried, states = go_on(copied(folder, tmp_path, 0))
    assert tried[-1] == values
    assert (states.count("FAIL"), states.count("RUNNING")) == (0, 1)  # Optuna still waits for a sign of life


@pytest.mark.slow
def test_processes_share_the_trials_of_one_study(tmp_path, monkeypatch, capsys):
    process = begin(tmp_path, 2, 16, 0)
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path), "2", "16", "0"])
    exec(PROGRAM, {})  # the other process is this one
    shown = [process.communicate()[0].splitlines(), capsys.readouterr().out.splitlines()]
    assert process.returncode == 0
    for sampler, *pair in zip(("grid", "random"), *shown, strict=True):
        (mine, result), (theirs, same) = map(json.loads, pair)
        made = {tuple(values.items()) for values in mine + theirs}
        assert min(len(mine), len(theirs)) >= 2
        assert 16 <= len(mine + theirs) <= 17  # each begins trials until it knows of sixteen
        assert len(made) == (16 if sampler == "grid" else len(mine + theirs))
        assert all(16 <= len(rows) <= len(made) for rows in (result, same))


def test_a_grid_whose_points_are_all_done_is_not_tried_again(tmp_path):
    options = {"sampler": "grid", "points": 3, "storage": tmp_path / "search.db"}
    result = search(lambda v: v["x"] + v["y"], SQUARE, **options)
    again = search(lambda v: pytest.fail("one more"), SQUARE, **options)
    assert again.trials == result.trials


def test_a_point_that_another_process_failed_at_is_made_before_a_grid_ends():
    place = optuna.storages.InMemoryStorage()
    options = {"sampler": "grid", "points": 2, "storage": place}
    tried = []

    def last(values):
        tried.append(values)
        if len(tried) == 4:  # meanwhile another process
            with pytest.raises(ZeroDivisionError):
                search(lambda v: 1 / 0, SQUARE, **options)
        return values["x"]

    result = search(last, SQUARE, **options)
    assert len(result.trials) == len({tuple(v.items()) for v in values_of(result)}) == 4


def test_a_point_that_two_processes_made_at_once_is_one_trial():
    place = optuna.storages.InMemoryStorage()
    search(lambda v: v["x"], SQUARE, sampler="random", trials=1, storage=place)
    twice = optuna.load_study(study_name="search", storage=place)
    for value in (1.0, 2.0):
        attributes = {"user_attrs": {"seconds": 1.0}, "system_attrs": {"grid_id": 7}}
        twice.add_trial(optuna.create_trial(value=value, **attributes))
    result = search(lambda v: v["x"], SQUARE, sampler="random", trials=3, storage=place)
    assert [row["trial"] for row in result.trials] == [0, 1, 3]


def test_tables_that_another_process_is_making_are_awaited(monkeypatch, tmp_path):
    from sqlalchemy.exc import OperationalError

    make_tables, failures = optuna.storages.RDBStorage.__init__, 2

    def busy(*arguments, **options):
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise OperationalError("CREATE TABLE studies", {}, Exception("table studies already exists"))
        make_tables(*arguments, **options)

    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(optuna.storages.RDBStorage, "__init__", busy)
    options = {"trials": 2, "storage": tmp_path / "search.db"}
    assert len(search(lambda v: v["x"], SQUARE, **options).trials) == 2
    failures = 99
    with pytest.raises(OperationalError):
        search(lambda v: v["x"], SQUARE, **options)


def test_connections_are_closed(tmp_path):
    place = tmp_path / "search.db"
    search(lambda v: v["x"], SQUARE, trials=2, storage=place)
    held = (
        [link.resolve() for link in Path("/proc/self/fd").glob("*")] if Path("/proc/self/fd").exists() else []
    )
    assert place.resolve() not in held


# --- The names that are a function and a module.


IMPORTS = [
    "import bestresponse.search",
    "from bestresponse import search; assert callable(search)",
    "from bestresponse.search import SearchResult",
    "import importlib; importlib.import_module('bestresponse.search')",
    "import importlib, sys, bestresponse; importlib.reload(sys.modules['bestresponse.search'])",
    "import bestresponse.influence",
    "from bestresponse.influence import Influence",
    "import bestresponse.experiments.lstm",
]


def test_the_functions_have_their_names_whatever_is_imported():
    program = f"""
import sys

for imports in {IMPORTS!r}:
    for name in [name for name in sys.modules if name.partition(".")[0] == "bestresponse"]:
        del sys.modules[name]
    exec(imports, {{}})
    import bestresponse as br
    exec(imports, {{}})
    assert "optuna" not in sys.modules, "it must be imported where it is used"
    print(br.search.__name__, callable(br.search), br.influence.__name__, callable(br.influence))
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "search True influence True\n" * len(IMPORTS)
