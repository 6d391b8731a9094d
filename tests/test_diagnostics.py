import json
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
import cases
from bestresponse import _tree
from bestresponse.cli import main
from bestresponse.diagnostics import Check, check, measuring, methods
from bestresponse.diagnostics.findings import Bench
from bestresponse.diagnostics.retraining import retrain
from bestresponse.testing.comparison import NoTrace

pytestmark = pytest.mark.usefixtures("verifying")


@pytest.fixture(autouse=True)
def few_methods(request, monkeypatch):
    """Compare one method alone, where the comparison is not what a test is about."""
    if "every_method" not in request.fixturenames:
        whole = methods.candidates
        first = lambda *arguments: dict(list(whole(*arguments).items())[:1])  # noqa: E731
        monkeypatch.setattr(methods, "candidates", first)
        monkeypatch.setattr(measuring, "_alive", list)  # slow among the many objects of a test session


@pytest.fixture
def every_method():
    """Compare all methods."""


def fit(model, hyper, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def data(count=24):
    return (torch.randn(count, 3), torch.randint(2, (count,)))


def problem_of(model, train_loss=None, hyper=None, val_loss=fit):
    hyper = hyper or br.hyperparameters.WeightDecay(model, initial=0.05)
    return br.Problem(model, hyper, train_loss or (lambda m, h, b: fit(m, h, b) + h(m)), val_loss)


def settled(problem, train):
    """At the stationary point of a convex training loss, by Newton's method from weights of zero."""
    with torch.no_grad():
        for w in problem.weights.values():
            w.zero_()
    cases.newton(problem, train)
    return problem


def of(found: Check, topic, *levels):
    return [
        f.text for f in found.findings if f.topic == topic and f.level in (levels or ("error", "warning"))
    ]


class Network(nn.Module):
    """Two layers, with something between them."""

    def __init__(self, between=lambda h: h):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(3, 5), nn.Linear(5, 2), between

    def forward(self, x):
        return self.last(self.between(torch.tanh(self.first(x))))


# --- a good problem -------------------------------------------------------------------------------


def test_a_good_problem_has_no_errors_and_the_right_numbers(every_method):
    train, val = data(), data()
    problem = settled(problem_of(nn.Linear(3, 2)), train)
    found = check(problem, train, val, retrain_steps=200, methods={"exact": br.Implicit(br.Exact())})
    assert found.ok
    assert not [f for f in found.findings if f.level == "warning"], str(found)
    with problem.undisturbed() as passes:
        matrix = br.Hessian().linearise(passes, train)
        dense = br.solvers.direct.dense(matrix, _tree.detached({**problem.weights}))
    values = torch.linalg.eigvalsh(dense)
    assert found.spectrum.lowest == pytest.approx(float(values[0]), rel=1e-6)
    assert found.spectrum.highest == pytest.approx(float(values[-1]), rel=1e-6)
    assert found.spectrum.to_gain < 1e-8
    exact = br.hypergradient(problem, train, val, br.Implicit(br.Exact())).norm
    # Training again tells the same slope as the implicit function theorem.
    assert found.retraining.slope == pytest.approx(exact, rel=1e-3)
    by_name = {r.method: r for r in found.rows}
    assert by_name["exact"].slope == pytest.approx(exact, rel=1e-3)
    assert by_name["exact"].cosine == pytest.approx(1.0, abs=1e-6)
    assert by_name["Implicit(Identity())"].cosine < 0.99
    assert all(r.seconds > 0 and r.memory > 0 for r in found.rows[1:])
    assert "times the slope of retraining" in found.recommendation.watch


def test_it_changes_nothing(every_method):
    problem, train, val = cases.network(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.3)))
    optimizer = torch.optim.Adam(problem.weights.values(), 0.01)
    for p in problem.weights.values():
        p.grad = torch.ones_like(p)
    method = br.Implicit()
    br.hypergradient(problem, train, val, method)
    state, warned, seen = problem.state(method).solution, set(problem._warned), len(problem._seen)
    with NoTrace(problem):
        found = check(
            problem, train, val, weight_optimizer=optimizer, methods={"mine": method}, retrain_steps=5
        )
    assert found.ok, str(found)
    assert problem.state(method).solution is state
    assert (problem._warned, len(problem._seen)) == (warned, seen)
    assert not optimizer.state


def test_training_again_moves_running_statistics():
    batch = (data()[0] + 5.0, data()[1])
    problem = problem_of(nn.Sequential(nn.BatchNorm1d(3, momentum=0.5), nn.Linear(3, 2)))
    direction = {n: torch.ones_like(p) for n, p in problem.hyperparameters.items()}
    slopes = []
    for _ in range(2):
        slopes.append(retrain(Bench(problem, batch, batch, 0), direction, 0.01, 2.0, 40).slope)
        for _ in range(40):
            problem.model(batch[0])  # which brings the statistics of the batch, as training does
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-3)


def test_it_says_the_same_twice():
    problem, train, val = cases.network(nn.Dropout(0.3))
    one, other = (check(problem, train, val, retrain_steps=5) for _ in range(2))
    assert one.findings == other.findings
    assert [r.slope for r in one.rows] == [r.slope for r in other.rows]


def test_it_is_data_and_text(every_method):
    problem, train, val = cases.network()
    found = check(problem, train, val, retrain_steps=5)
    plain = json.loads(json.dumps(found.data()))
    assert plain["spectrum"]["highest"] == found.spectrum.highest
    assert plain["findings"][0]["topic"] == "losses"
    text = str(found)
    assert [line[:7] for line in text.splitlines() if line[:1] in "CW" and ":" in line[:7]][-3:] == [
        "Call:  ",
        "Cost:  ",
        "Watch: ",
    ]
    assert "Implicit(Neumann(20))" in text
    assert max(map(len, text.splitlines())) <= 140


def test_a_direct_problem_and_float32_and_several_batches():
    torch.set_default_dtype(torch.float32)
    model = Network()
    hyper = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(()))})
    plain = problem_of(model, fit, hyper, lambda m, h, b: (fit(m, h, b) - h["shift"]).square())
    found = check(plain, data(), data(), retrain_steps=5)
    assert found.recommendation.call.startswith("Direct()")
    decayed = problem_of(Network())
    found = check(decayed, br.Batches([data(), data()]), data(), retrain_steps=5)
    assert found.ok, str(found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"retrain_steps": -1}, "retrain_steps"),
        ({"seed": 1.5}, "seed"),
        ({"methods": {"a": br.Neumann(3)}}, "A solver goes inside a method"),
    ],
)
def test_bad_arguments(arguments, words):
    problem, train, val = cases.network()
    with pytest.raises(br.Error, match=words):
        check(problem, train, val, **arguments)
    with pytest.raises(br.Error, match="must be a Problem"):
        check(problem.model, train, val)


# --- ten planted faults -----------------------------------------------------------------------------


def test_a_detached_feature():
    found = check(problem_of(Network(lambda h: h + (2 * h).detach())), data(), data(), retrain_steps=0)
    assert not found.ok
    (text,) = of(found, "first derivatives")
    assert "first.weight" in text
    assert "there is detach() in test_diagnostics.py" in text
    expected = "no method yet: fix what the check says about first derivatives, and check again."
    assert found.recommendation.call == expected


def test_a_feature_that_is_detached_in_the_gradient_alone():
    # The gradient is right, and its derivative is not: differences of the gradient find it.
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.detach())
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 3 * x.detach() ** 2 * grad

    found = check(problem_of(Network(Half.apply)), data(), data(), retrain_steps=0)
    assert not of(found, "first derivatives")
    assert "first.weight" in of(found, "second derivatives", "error")[0]


def test_an_edit_through_data():
    def between(h):
        h = h * 1.0
        h.data.mul_(0.5)
        return h

    found = check(problem_of(Network(between)), data(), data(), retrain_steps=0)
    assert "first.weight" in of(found, "first derivatives")[0]
    assert ".data" in of(found, "first derivatives")[0]


def test_weights_that_are_edited_in_a_pass():
    class Clamped(Network):
        def forward(self, x):
            self.first.weight.data.mul_(0.9)
            return super().forward(x)

    model = Clamped()
    before = model.first.weight.detach().clone()
    found = check(problem_of(model), data(), data(), retrain_steps=0)
    assert "changed the values of first.weight" in of(found, "hypergradient", "error")[0]
    assert torch.equal(model.first.weight, before)


def test_a_once_differentiable_operation(every_method):
    found = check(problem_of(Network(cases.Cube.apply)), data(), data(), retrain_steps=5)
    assert "Cube" in of(found, "second derivatives", "error")[0]
    assert "FiniteDifference()" in found.recommendation.call
    assert {r.method.split("(")[0] for r in found.rows} == {"the reference", "Implicit", "Penalty", "SAMA"}
    assert all((r.slope is None) == r.method.startswith("SAMA") for r in found.rows)


def test_a_hyperparameter_that_touches_nothing():
    hyper = nn.ModuleDict({"decay": br.hyperparameters.WeightDecay(model := Network(), initial=0.05)})
    hyper.register_parameter("added", nn.Parameter(torch.zeros(())))
    train_loss = lambda m, h, b: fit(m, h, b) + h["decay"](m) + h.added  # noqa: E731
    found = check(problem_of(model, train_loss, hyper), data(), data(), retrain_steps=0)
    assert found.ok
    assert "['added'] reach train_loss, but not its gradient" in of(found, "hypergradient", "warning")[0]
    hyper.register_parameter("idle", nn.Parameter(torch.zeros(())))
    found = check(problem_of(model, train_loss, hyper), data(), data(), retrain_steps=0)
    assert "['idle'] reach neither" in of(found, "hypergradient", "error")[0]


def test_an_optimiser_with_a_decay_of_its_own():
    problem = problem_of(Network())
    optimizer = torch.optim.AdamW(problem.weights.values(), 1e-3, weight_decay=0.01)
    found = check(problem, data(), data(), weight_optimizer=optimizer, retrain_steps=0)
    assert "weight_decay=0" in of(found, "weight optimiser", "error")[0]
    good = torch.optim.AdamW(problem.weights.values(), 1e-3, weight_decay=0.0)
    assert check(problem, data(), data(), weight_optimizer=good, retrain_steps=0).ok


def test_a_captured_parameter(every_method):
    model = Network()
    weight = model.first.weight
    problem = problem_of(model, lambda m, h, b: fit(m, h, b) + h(m) + weight.square().sum())
    found = check(problem, data(), data(), retrain_steps=5)
    (unrolled,) = (r for r in found.rows if r.method.startswith("Unrolled"))
    assert unrolled.failed
    assert "first.weight" in unrolled.said
    assert found.retraining is not None


def test_dropout_without_a_fixed_mask():
    generator = torch.Generator().manual_seed(0)

    def between(h):
        return h * (torch.rand(h.shape, generator=generator) > 0.5)

    found = check(problem_of(Network(between)), data(), data(), retrain_steps=0)
    assert "train_loss must give the same value twice" in of(found, "repeatability", "error")[0]
    assert check(problem_of(Network(nn.Dropout(0.5))), data(), data(), retrain_steps=0).ok


@pytest.mark.parametrize("decayed", [True, False])
def test_a_loss_that_is_a_sum(decayed):
    def total(m, h, b):
        return F.cross_entropy(m(b[0]), b[1], reduction="sum") + (h(m) if decayed else 0 * h(m))

    found = check(problem_of(Network(), total, val_loss=total), data(), data(), retrain_steps=0)
    assert "train_loss must be a mean" in of(found, "scale", "error")[0]
    assert "val_loss must be a mean" in of(found, "scale", "warning")[0]
    assert not of(check(problem_of(Network()), data(), data(), retrain_steps=0), "scale")


def test_weights_far_from_stationary():
    train, val = data(), data()
    problem = problem_of(nn.Linear(3, 2))
    with torch.no_grad():
        problem.model.weight.mul_(20)
    assert of(check(problem, train, val, retrain_steps=0), "stationarity", "warning")
    assert not of(check(settled(problem, train), train, val, retrain_steps=0), "stationarity", "warning")


@pytest.mark.parametrize("width", [3, 400])
def test_a_singular_hessian(width):
    # More weights than examples, and no regulariser for most of them.
    model = nn.Linear(width, 1)
    hyper = nn.ParameterDict({"scale": nn.Parameter(torch.zeros(()))})
    x, y = torch.randn(2 if width == 3 else 20, width), torch.randn(2 if width == 3 else 20, 1)

    def loss(m, h, b):
        return h["scale"].exp() * (m(b[0]) - b[1]).square().mean() + 1e-9 * m.weight.square().sum()

    problem = br.Problem(model, hyper, loss, loss)
    found = check(problem, (x, y), (x, y), retrain_steps=0)
    assert any("singular" in text for text in of(found, "curvature", "warning"))
    regular = br.Problem(model, hyper, lambda m, h, b: loss(m, h, b) + 0.1 * m.weight.square().sum(), loss)
    assert not any("singular" in t for t in of(check(regular, (x, y), (x, y), retrain_steps=0), "curvature"))


def test_an_indefinite_hessian(every_method):
    problem, train, val = cases.network()
    with problem.undisturbed() as passes:
        system = br.Hessian().linearise(passes, train)
        dense = br.solvers.direct.dense(system, _tree.detached({**problem.weights}))
    assert float(torch.linalg.eigvalsh(dense)[0]) < 0
    found = check(problem, train, val, retrain_steps=0)
    assert any("indefinite" in text for text in of(found, "curvature", "warning"))
    rows = {row.method: row for row in found.rows}
    assert found.recommendation.call.startswith("Implicit()")
    assert not rows["Implicit()"].failed
    decay = br.hyperparameters.WeightDecay(problem.model, per="global")
    few = check(
        br.Problem(problem.model, decay, problem.train_loss, problem.val_loss), train, val, retrain_steps=0
    )
    assert "add curvature=GaussNewton()" in few.recommendation.call
    assert {"Implicit(MINRES(20))", "Implicit(solvers.GMRES(20))"} <= rows.keys()
    assert rows["Implicit(Neumann(20))"].failed
    assert not rows["Implicit(MINRES(20))"].failed


def test_no_method_is_recommended_that_the_table_shows_to_fail(every_method):
    """With negative curvature the default method solves a damped system, and has no answer to the question."""
    model, hyper = nn.ParameterDict({"w": torch.ones(3)}), nn.ParameterDict({"c": torch.zeros(3)})
    curvature, b = torch.tensor([3.0, 1.0, -1.0]), torch.tensor([1.0, 1.0, 1.0])
    train_loss = lambda m, h, _: 0.5 * (curvature * m["w"] * m["w"]).sum() - h["c"] @ m["w"]  # noqa: E731
    problem = br.Problem(model, hyper, train_loss, lambda m, h, _: b @ m["w"])
    found = check(problem, 0, 0, retrain_steps=0)
    failed = {row.method for row in found.rows if row.failed}
    assert {"Implicit()", "Implicit(ConjugateGradient(20, damping=None), warm_start=True)"} <= failed
    first = found.recommendation.call.split(", since")[0]
    assert first in {row.method for row in found.rows if not row.failed}
    assert "fails here: its solve ends with negative curvature" in found.recommendation.call


def test_weights_at_a_saddle_have_no_method_yet():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(1, 3))

        def forward(self, x):
            return x @ self.first.T @ self.last.T

    x = torch.randn(40, 4)
    train, val = (x, x @ torch.randn(4, 1)), (x + 0.1, x @ torch.randn(4, 1))
    fit = lambda m, h, b: (m(b[0]) - b[1]).square().mean()  # noqa: E731
    found = check(
        problem_of(Product(), lambda m, h, b: fit(m, h, b) + h(m), val_loss=fit), train, val, retrain_steps=5
    )
    assert any("saddle" in text for text in of(found, "stationarity", "warning"))
    assert any("no hyperparameter moves val_loss" in text for text in of(found, "hypergradient", "warning"))
    assert found.recommendation.call.startswith("no method yet: train_loss needs a minimum")


@pytest.mark.parametrize(("start", "steps"), [(1e-3, 100), (1e-3, 2000), (3.0, 200)])
def test_a_training_loss_without_a_minimum(start, steps):
    model, hyper = nn.ParameterDict({"w": torch.full((2,), start)}), nn.ParameterDict({"c": torch.zeros(2)})
    curvature = torch.tensor([3.0, -1.0])
    train_loss = lambda m, h, _: 0.5 * (curvature * m["w"] * m["w"]).sum() - 1e-3 * h["c"] @ m["w"]  # noqa: E731
    problem = br.Problem(model, hyper, train_loss, lambda m, h, _: (m["w"] - 1.0).square().sum())
    found = check(problem, 0, 0, retrain_steps=steps)
    assert found.retraining is None
    assert any("falls without bound" in text for text in of(found, "retraining", "warning"))
    assert found.recommendation.call.startswith("no method yet: train_loss needs a minimum")


def test_a_training_loss_without_curvature():
    model, hyper = nn.ParameterDict({"w": torch.ones(3)}), nn.ParameterDict({"c": torch.ones(3)})
    problem = br.Problem(
        model, hyper, lambda m, h, _: (h["c"] * m["w"]).sum(), lambda m, h, _: m["w"].square().sum()
    )
    found = check(problem, 0, 0, retrain_steps=5)
    assert any(
        "falls without bound along its gradient" in text for text in of(found, "stationarity", "warning")
    )
    assert found.recommendation.call.startswith("no method yet: train_loss needs a minimum")


def test_a_model_that_fits_its_batch_exactly_needs_a_regulariser():
    model = nn.Linear(30, 1)
    x, y = torch.randn(10, 30), torch.randn(10, 1)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
        model.bias.zero_()
    fit = lambda m, h, b: (m(b[0]) - b[1]).square().mean()  # noqa: E731
    hyper = nn.ParameterDict({"scale": torch.zeros(())})
    problem = br.Problem(model, hyper, lambda m, h, b: h["scale"].exp() * fit(m, h, b), fit)
    found = check(problem, (x, y), (torch.randn(10, 30), torch.randn(10, 1)), retrain_steps=20)
    assert any("fits this batch exactly" in text for text in of(found, "stationarity", "warning"))
    assert found.recommendation.call.startswith("no method yet: add a regulariser")
    assert "the Hessian is singular" in str(found).replace("\n         ", " ")


@pytest.mark.parametrize("columns", [80, 100])
def test_the_table_and_the_recommendation_fit_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    problem, train, val = cases.network()
    text = str(check(problem, train, val, retrain_steps=5))
    assert max(map(len, text.splitlines())) <= columns
    assert [
        line for line in text.splitlines() if line.startswith("method ")
    ]  # a table, no block for each method


# --- losses that fail --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train_loss", "words"),
    [
        (lambda m, h, b: fit(m, h, b) * float("nan"), "must be finite"),
        (lambda m, h, b: fit(m, h, b).detach(), "detached"),
        (lambda m, h, b: h(m).detach() + sum(p.sum() for p in h.parameters()), "reaches none of"),
        (lambda m, h, b: m(b[0]), "scalar"),
    ],
)
def test_losses_that_fail_are_findings(train_loss, words):
    found = check(problem_of(Network(), train_loss), data(), data())
    (error,) = (f for f in found.findings if f.level == "error")
    assert words in error.text
    assert found.spectrum is None
    expected = f"no method yet: fix what the check says about {error.topic}, and check again."
    assert found.recommendation.call == expected


def test_an_error_in_the_users_own_code_is_a_finding():
    def broken(m, h, b):
        raise KeyError("labels")

    problem, train, val = problem_of(Network(), broken), data(), data()
    with NoTrace(problem):
        found = check(problem, train, val)
    (text,) = of(found, "losses", "error")
    assert "KeyError: 'labels' (test_diagnostics.py" in text


def test_an_interrupt_comes_through_and_leavesNoTrace():
    calls = []

    def interrupted(m, h, b):
        calls.append(0)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return fit(m, h, b) + h(m)

    problem, train, val = problem_of(Network(), interrupted), data(), data()
    with NoTrace(problem), pytest.raises(KeyboardInterrupt):
        check(problem, train, val)


def test_a_gradient_that_is_not_finite_is_named():
    model = Network()
    broken = lambda m, h, b: fit(m, h, b) + h(m) + (0 * m.first.weight.square().sum()).sqrt()  # noqa: E731
    found = check(problem_of(model, broken), data(), data())
    assert "first derivative of SqrtBackward0" in of(found, "hypergradient", "error")[0]
    assert found.spectrum is None


def test_weights_that_were_frozen():
    problem = problem_of(model := Network())
    model.requires_grad_(False)
    found = check(problem, data(), data())
    assert "were frozen" in of(found, "parameters", "error")[0]
    assert not found.ok


# --- no false alarms ----------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block whose branch is zero at first, and stands on kinks."""

    def __init__(self, c):
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c)
        self.c2, self.b2 = nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c)
        nn.init.zeros_(self.b2.weight)

    def forward(self, x):
        return F.relu(x + self.b2(self.c2(F.relu(self.b1(self.c1(x))))))


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(20, 6, padding_idx=0), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.table(x)).mean(1))


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


def zero_biases(model):
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(p)
    return model


def scaled(model, factor):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


def blank(x):
    x[:, :, :2] = x[:, :, -2:] = 0.0
    return x


def labels(count, classes=5):
    return torch.randint(classes, (count,))


GOOD = {
    "deep ReLU": lambda: (
        nn.Sequential(
            *(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU()),
            *(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 5)),
        ),
        (torch.randn(64, 20), labels(64)),
    ),
    "wide ReLU": lambda: (
        nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 5)),
        (torch.randn(256, 20), labels(256)),
    ),
    "zero-initialised residual blocks": lambda: (
        nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            Block(4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 5),
        ),
        (torch.randn(8, 3, 6, 6), labels(8)),
    ),
    "black borders and zero biases": lambda: (
        zero_biases(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5))
        ),
        (blank(torch.rand(16, 1, 8, 8)), labels(16)),
    ),
    "padding": lambda: (Padded(), (torch.randint(20, (32, 6)) * (torch.arange(6) < 4), labels(32, 3))),
    "bfloat16 autocast": lambda: (Halves(), (torch.randn(64, 20), labels(64))),
    "saturated": lambda: (
        scaled(nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)), 30.0),
        (torch.randn(64, 20), labels(64)),
    ),
    "dropout and batch norm": lambda: (
        nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Dropout(0.3), nn.ReLU(), nn.Linear(30, 5)),
        (torch.randn(33, 20), labels(33)),
    ),
    "one example": lambda: (nn.Linear(20, 5), (torch.randn(1, 20), labels(1))),
    "a dict": lambda: (
        nn.ModuleDict({"net": nn.Linear(20, 5)}),
        {0: torch.randn(7, 20), 1: labels(7), "meta": None},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", GOOD)
def test_good_problems_raise_no_alarm(name, dtype):
    torch.set_default_dtype(dtype)
    model, batch = GOOD[name]()
    if isinstance(model, nn.ModuleDict):
        model.forward = lambda x: model["net"](x)
    found = check(problem_of(model), batch, batch, retrain_steps=0)
    assert found.ok, str(found)


def test_contrastive_losses_are_no_sums():
    def contrast(m, h, b):
        one, other = (F.normalize(m(x), dim=1) for x in b)
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))

    x = torch.randn(32, 3)
    batch = (x, x + 0.1 * torch.randn(32, 3))
    problem = problem_of(nn.Linear(3, 6), lambda m, h, b: contrast(m, h, b) + h(m), val_loss=contrast)
    assert not of(check(problem, batch, batch, retrain_steps=0), "scale")


@pytest.mark.parametrize("count", [1, 25])
@pytest.mark.parametrize("decay", [0.0, 10.0])
def test_sums_over_batches_of_any_size_are_found(decay, count):
    def total(m, h, b):
        return F.cross_entropy(m(b[0]), b[1], reduction="sum") + h(m) + decay * m.last.weight.square().sum()

    found = check(problem_of(Network(), total), data(count), data(), retrain_steps=0)
    assert of(found, "scale", "error")


def test_batches_that_are_no_tensors_are_left_alone():
    x = torch.randn(6, 3)
    for batch in (None, [x], object()):
        problem = problem_of(
            nn.Linear(3, 2), lambda m, h, b: m(x).square().mean() + h(m), val_loss=lambda m, h, b: m(x).mean()
        )
        assert check(problem, batch, batch, retrain_steps=0).ok

    def exact(m, h, b):
        assert len(b[0]) == 24
        return fit(m, h, b)

    assert check(
        problem_of(Network(), lambda m, h, b: exact(m, h, b) + h(m)), data(), data(), retrain_steps=0
    ).ok


# --- faults that are hard to see --------------------------------------------------------------------------


class Deep(nn.Module):
    """Twenty-five residual layers, one of which detaches a part of itself."""

    def __init__(self, bad, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(25))
        self.sides = nn.ModuleList(nn.Linear(width, width) for _ in range(25))
        self.last, self.bad = nn.Linear(width, 2), bad

    def forward(self, x):
        h = F.pad(x, (0, 5))
        for i, (layer, side) in enumerate(zip(self.layers, self.sides, strict=True)):
            gate = torch.sigmoid(side(h))
            h = h + 0.3 * (gate.detach() if i == self.bad else gate) * torch.tanh(layer(h))
        return self.last(h)


@pytest.mark.slow
def test_a_small_detached_part_behind_a_strong_regulariser():
    torch.set_default_dtype(torch.float32)
    train_loss = lambda m, h, b: fit(m, h, b) + h(m) + 0.05 * sum(p.square().sum() for p in m.parameters())  # noqa: E731
    assert not check(problem_of(Deep(20), train_loss), data(), data(), retrain_steps=0).ok
    assert check(problem_of(Deep(None), train_loss), data(), data(), retrain_steps=0).ok


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


@pytest.mark.slow
def test_hyperparameters_are_checked_whatever_the_number_of_weights():
    hyper = nn.ParameterDict({"rate": nn.Parameter(torch.tensor(-3.0))})
    train_loss = lambda m, h, b: fit(m, h, b) + 0.01 * Wrong.apply(h["rate"]) * m.last.weight.square().sum()  # noqa: E731
    found = check(problem_of(Deep(None), train_loss, hyper), data(), data(), retrain_steps=0)
    assert "rate" in of(found, "first derivatives", "error")[0]


def test_a_fresh_network_is_not_called_stationary():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 3))
    batch = (torch.randn(40, 8), torch.randint(3, (40,)))
    problem = problem_of(model, hyper=br.hyperparameters.WeightDecay(model, initial=1e-4))
    assert not [
        f
        for f in check(problem, batch, batch, retrain_steps=0).findings
        if f.topic == "stationarity" and f.level == "ok"
    ]
    assert of(check(problem, batch, batch), "stationarity", "warning")


def test_a_singular_hessian_that_is_indefinite_as_well():
    model = nn.ParameterDict({"w": nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))})
    hyper = nn.ParameterDict({"h": nn.Parameter(torch.tensor(1.0))})
    bend = torch.tensor([-2.0, 0.0, 10.0])
    loss = lambda m, h, b: 4 + h["h"] * (bend * m["w"].square()).sum() / 2  # noqa: E731
    texts = of(
        check(br.Problem(model, hyper, loss, loss), None, None, retrain_steps=0), "curvature", "warning"
    )
    assert any("singular" in t for t in texts)
    assert any("indefinite" in t for t in texts)


def test_small_faults_of_modes_and_optimisers():
    def val(m, h, b):
        m.train()
        return fit(m, h, b)

    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    found = check(problem_of(model, val_loss=val), data(), data(), retrain_steps=0)
    assert any("training mode" in t for t in of(found, "losses", "warning"))
    upwards = torch.optim.SGD(model.parameters(), 0.1, maximize=True)
    found = check(problem_of(model), data(), data(), weight_optimizer=upwards, retrain_steps=0)
    assert "maximize" in of(found, "weight optimiser", "error")[0]
    drop = br.hyperparameters.ConcreteDropout()
    asleep = nn.Sequential(nn.Linear(3, 4), drop, nn.Linear(4, 2)).eval()
    found = check(br.Problem(asleep, drop, fit, fit), data(), data(), retrain_steps=0)
    assert "in eval mode, which turns dropout off" in of(found, "hypergradient", "error")[0]


def test_a_pending_graph_of_the_callers_outlives_a_check():
    problem, train = problem_of(Network()), data()
    loss = fit(problem.model, None, train)
    check(problem, train, train, retrain_steps=0)
    loss.backward()


def test_numbers_that_are_not_finite_are_none_in_json():
    model = nn.Sequential(nn.Linear(3, 60), nn.Tanh(), nn.Linear(60, 2))
    found = check(problem_of(model), data(), data(), retrain_steps=5)
    json.dumps(found.data(), allow_nan=False)


# --- the command ---------------------------------------------------------------------------------------

MODULE = """
import torch, torch.nn.functional as F
from torch import nn
import bestresponse as br

def fit(m, h, b):
    return F.cross_entropy(m(b[0]), b[1])

def make_problem():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    decay = br.hyperparameters.WeightDecay(model)
    batch = (torch.randn(20, 3), torch.randint(2, (20,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit), batch, batch, optimizer

def bad():
    problem, train, val, _ = make_problem()
    problem.train_loss = lambda m, h, b: fit(m, h, b).detach()
    return problem, train, val

def nothing():
    return 3

def raises():
    return {}["labels"]
"""


def test_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tuning.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "mine" / "broken.py").write_text("def make(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    words = ["check", "mine.tuning:make_problem", "--json", "found.json", "--retrain-steps", "20"]
    assert main(words) == 0
    assert "Call:  " in capsys.readouterr().out
    assert json.loads((tmp_path / "found.json").read_text())["spectrum"]["whole"] is True
    assert main(["check", "mine.tuning:bad"]) == 1
    assert "ERROR" in capsys.readouterr().out
    for words, expected in (
        (("check", "mine.tuning"), "package.module:function"),
        (("check", "mine.tuning:raises"), "raised KeyError: 'labels'"),
        (("check", "mine.broken:make"), "SyntaxError"),
        (("check", ".tuning:make"), "package.module:function"),
        (("check", "mine.tuning:make_problem", "--json", "nowhere/found.json"), "nowhere/found.json"),
        (("check", "nowhere:make"), "needs the module 'nowhere'"),
        (("check", "mine.tuning:absent"), "has no 'absent'"),
        (("check", "mine.tuning:nothing"), "must return (problem, train_batch, val_batch)"),
    ):
        code = main(words)
        err = capsys.readouterr().err
        assert code == 2
        assert expected in err
        assert "Traceback" not in err
