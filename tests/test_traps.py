"""Models and inputs that have led such libraries to wrong answers without a word."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
import cases
from bestresponse.hyperparameters import WeightDecay
from bestresponse.runs import callbacks
from bestresponse.testing import check_method


def problem_of(model, **decay):
    decay = WeightDecay(model, **{"initial": 0.3, **decay})

    def loss(model, hyper, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    return br.Problem(model, decay, lambda m, h, b: loss(m, h, b) + h(m), loss)


def batch():
    return torch.randn(12, 3), torch.randn(12, 3)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_weight_norm_whose_second_derivative_torch_gets_wrong(norm):
    problem = problem_of(nn.Sequential(norm(nn.Linear(3, 3))))
    b = batch()
    for method in (br.Implicit(br.Exact()), br.Unrolled(2, 0.1)):
        with pytest.raises(br.Error, match="weight_norm"):
            br.hypergradient(problem, b, b, method)
    br.hypergradient(problem, b, b, br.Implicit(br.Exact(), br.FiniteDifference()))


def test_spectral_norm_in_training_mode_warns():
    problem = problem_of(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))))
    b = batch()
    with pytest.warns(br.BestResponseWarning, match="spectral_norm"):
        br.hypergradient(problem, b, b, br.Implicit(br.Identity()))


def test_exact_with_half_precision_weights_is_not_zero():
    problem = problem_of(nn.Linear(20, 10).bfloat16())
    b = torch.randn(64, 20).bfloat16(), torch.randn(64, 10).bfloat16()
    assert br.hypergradient(problem, b, b, br.Implicit(br.Exact())).norm > 1e-3


@pytest.mark.filterwarnings("ignore:Exact needs an invertible")
def test_exact_tells_where_there_is_no_solution():
    skew = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    zero = torch.zeros(2, 2)
    for matrix in (skew, zero):
        report = (
            br.Exact().solve(lambda v, matrix=matrix: {"x": matrix @ v["x"]}, {"x": torch.ones(2)}).report
        )
        assert report.status.failed
        assert report.residual == pytest.approx(1.0)


def test_a_runaway_solve_is_not_a_step_limit():
    basis, _ = torch.linalg.qr(torch.randn(50, 50, generator=torch.Generator().manual_seed(1)))
    matrix = (basis[:, 5:] @ torch.diag(torch.linspace(0.5, 1, 45)) @ basis[:, 5:].T).float()
    solution = br.ConjugateGradient(damping=None).solve(
        lambda v: {"x": matrix @ v["x"]}, {"x": basis[:, 0].float()}
    )
    # Rounding decides how it ends. A damping that was chosen, δ, makes b / δ the right answer, however large.
    x, report = solution.x["x"], solution.report
    residual = float((matrix @ x + (report.damping or 0.0) * x - basis[:, 0].float()).norm())
    assert report.status.failed or residual <= 101.0
    assert residual <= 1.5 * report.residual + 0.5


def test_a_hypergradient_that_is_not_finite_is_an_error_and_stays_out_of_grad():
    hyper = nn.ParameterDict({"a": nn.Parameter(torch.tensor(0.0))})
    problem = br.Problem(
        nn.Linear(3, 3),
        hyper,
        lambda m, h, b: F.mse_loss(m(b[0]), b[1]) + m.weight.square().sum() * (0.1 + h["a"].sqrt()),
        lambda m, h, b: F.mse_loss(m(b[0]), b[1]),
    )
    b = batch()
    with pytest.raises(br.Error, match=r"hypergradient must be finite.*'a'"):
        br.backward(problem, b, b, br.Implicit())
    assert hyper["a"].grad is None


def test_retrain_uses_the_rate_from_before_a_warmup_scheduler():
    problem, train, val = cases.network()
    weights = torch.optim.SGD(problem.weights.values(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(weights, lambda step: min(1.0, step / 5))
    hyper = torch.optim.Adam(problem.hyperparameters.values(), 0.05)
    tuner = br.Tuner(problem, weights, hyper, br.Implicit(br.Identity()), weight_scheduler=scheduler)
    losses = tuner.retrain([train], 10, lambda model: None)
    assert losses[-1] < losses[0]
    assert weights.param_groups[0]["lr"] == 0.0


def test_weights_replaced_or_frozen_after_the_problem_was_made_are_named():
    problem, train, val = cases.network()
    method = br.Implicit(br.Identity())
    problem.model[0].bias.requires_grad_(False)
    with pytest.raises(br.Error, match=r"\['0.bias'\] were frozen"):
        br.hypergradient(problem, train, val, method)
    problem.model[3] = nn.Linear(4, 2)
    with pytest.raises(br.Error, match=r"\['3.weight', '3.bias'\] were replaced"):
        br.hypergradient(problem, train, val, method)
    tuner = br.Tuner(
        problem,
        torch.optim.SGD(problem.weights.values(), 0.1),
        torch.optim.SGD(problem.hyperparameters.values(), 0.1),
        method,
    )
    with pytest.raises(br.Error, match="were replaced"):
        tuner.fit([train], [val], 1)


def test_rates_of_half_precision_weights_can_move():
    decay = WeightDecay(nn.Linear(3, 3).bfloat16())
    optimizer = torch.optim.SGD(decay.parameters(), 1e-3)
    for parameter in decay.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(float((p.detach() + 8).abs().min()) > 5e-4 for p in decay.parameters())


def test_a_hyperparameter_that_only_adds_a_constant_is_named():
    hyper = nn.ParameterDict({"a": nn.Parameter(torch.tensor(0.0))})
    loss = lambda m, h, b: F.mse_loss(m(b[0]), b[1])  # noqa: E731
    problem = br.Problem(nn.Linear(3, 3), hyper, lambda m, h, b: loss(m, h, b) + h["a"], loss)
    b = batch()
    with pytest.warns(br.BestResponseWarning, match=r"\['a'\] reach train_loss, but not its gradient"):
        br.hypergradient(problem, b, b, br.Implicit(br.Exact()))


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 3)

    def forward(self, x):
        return self.out(self.embed(torch.arange(len(x)) % 5) + x)


class Growing(nn.Module):
    """A cache that grows with the batch, as rotary embeddings keep it."""

    def __init__(self):
        super().__init__()
        self.out, self.length = nn.Linear(3, 3), 4
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def forward(self, x):
        if len(x) > self.length:
            self.length = len(x)
            self.register_buffer("cache", torch.ones(len(x)), persistent=False)
        return self.out(x) * self.cache[: len(x), None]


def test_an_embedding_that_renormalises_itself_is_put_back():
    check_method(br.Implicit(br.Identity()), problem_of(Renormed()), batch(), batch())


def test_a_cache_that_grew_stays():
    problem = problem_of(Growing())
    b = batch()
    br.hypergradient(problem, b, b, br.Implicit(br.Exact()))
    problem.model(b[0])
    assert len(problem.model.cache) == 12


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_modules_are_put_back_by_value():
    model = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    problem = problem_of(model)
    before = {n: b.clone() for n, b in model.named_buffers()}
    b = batch()
    with pytest.warns(br.errors.BestResponseWarning, match="scripted"):
        br.hypergradient(problem, b, b, br.Implicit(br.ConjugateGradient(2, damping=1.0)))
    assert all(torch.equal(x, before[n]) for n, x in model.named_buffers())


def test_a_decay_of_power_between_one_and_two_at_a_zero_weight():
    model = nn.Linear(3, 3)
    nn.init.zeros_(model.bias)
    h = br.hypergradient(problem_of(model, power=1.5), batch(), batch(), br.Implicit(br.Exact()))
    assert not h.solve.status.failed
    assert h.norm > 0


def test_a_decay_of_a_part_of_the_model_has_no_diagonal_to_offer():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    decay = WeightDecay(model[0], initial=0.1)
    fit = lambda m, h, b: F.mse_loss(m(b[0]), b[1])  # noqa: E731
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m[0]), fit)
    method = br.Implicit(br.ConjugateGradient(3, damping=1.0, diagonal=True))
    assert br.hypergradient(problem, batch(), batch(), method).norm > 0


def test_evaluate_puts_buffers_back_by_value():
    problem, train, val = cases.network()
    problem.model.register_buffer("calls", torch.zeros(()))

    def measure(model, hyper):
        model.calls += 1
        return {"calls": model.calls}

    tuner = br.Tuner(
        problem,
        torch.optim.SGD(problem.weights.values(), 0.1),
        torch.optim.SGD(problem.hyperparameters.values(), 0.1),
        br.Implicit(br.Identity()),
        callbacks=[callbacks.Evaluate(measure)],
    )
    tuner.fit([train], [val], 3)
    assert float(problem.model.calls) == 0.0
    assert [row["calls"] for row in tuner.history] == [1.0, 1.0, 1.0]


def test_every_callback_is_closed_though_one_of_them_fails():
    closed = []

    class Closing:
        def __init__(self, name, fails):
            self.name, self.fails = name, fails

        def __call__(self, tuner):
            raise ValueError("the run's own error")

        def close(self):
            closed.append(self.name)
            if self.fails:
                raise OSError("disk full")

    problem, train, val = cases.network()
    tuner = br.Tuner(
        problem,
        torch.optim.SGD(problem.weights.values(), 0.1),
        torch.optim.SGD(problem.hyperparameters.values(), 0.1),
        br.Implicit(br.Identity()),
        callbacks=[Closing("a", False), Closing("b", True)],
    )
    with pytest.raises(OSError, match="disk full") as caught:
        tuner.fit([train], [val], 1)
    assert "the run's own error" in str(caught.value.__context__)
    assert sorted(closed) == ["a", "b"]


@pytest.mark.parametrize("steps", [-1, 2.5, "3"])
def test_counts_must_be_integers(steps):
    problem, train, val = cases.network()
    tuner = br.Tuner(
        problem,
        torch.optim.SGD(problem.weights.values(), 0.1),
        torch.optim.SGD(problem.hyperparameters.values(), 0.1),
    )
    with pytest.raises(br.Error, match="hyper_steps must be an integer"):
        tuner.fit([train], [val], steps)
    with pytest.raises(br.Error, match="steps must be an integer"):
        tuner.retrain([train], steps, lambda model: None)
    with pytest.raises(br.Error, match="seed must be an integer"):
        br.hypergradient(problem, train, val, br.Implicit(), seed=1.5)


def test_lazy_modules_must_have_run_once():
    lazy = nn.LazyLinear(3)
    with pytest.raises(br.Error, match="lazy"):
        br.Problem(lazy, nn.Linear(1, 1), lambda *a: None, lambda *a: None)


def test_reused_methods_do_not_warn_of_being_made_anew():
    problem, train, val = cases.network()
    for _ in range(2):
        tuner = br.Tuner(
            problem,
            torch.optim.SGD(problem.weights.values(), 0.1),
            torch.optim.SGD(problem.hyperparameters.values(), 0.1),
        )
        tuner.fit([train], [val], 3)
        del tuner


# --- batches that a loss changes --------------------------------------------------------------------------


def in_place(model, hyper, b):
    return F.mse_loss(model(b["x"].div_(1.5)), b["y"]) + hyper(model)


def replacing(model, hyper, b):
    b["x"] = b["x"] / 1.5
    b["more"].append(b.pop("y"))
    return F.mse_loss(model(b["x"]), b["more"][-1]) + hyper(model)


def pure(model, hyper, b):
    return F.mse_loss(model(b["x"] / 1.5), b["y"]) + hyper(model)


METHODS = {
    "implicit": lambda: br.Implicit(br.Exact(damping=1.0)),
    "differences": lambda: br.Implicit(br.Exact(damping=1.0), br.FiniteDifference()),
    "unrolled": lambda: br.Unrolled(2, 0.1),
    "forward": lambda: br.Forward(2, 0.1),
    "penalty": lambda: br.Penalty(3, 0.05),
}


def of_losses(train_loss, val_loss, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    return br.Problem(model, WeightDecay(model, initial=0.3), train_loss, val_loss, **settings)


def dicts():
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, 3, generator=g, dtype=torch.float64) for _ in range(2))
    return {"x": x, "y": y, "more": []}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("edited", ["train_loss", "val_loss"])
def test_a_loss_that_edits_its_batch_is_right_or_named(method, verify, edited):
    losses = {"train_loss": pure, "val_loss": pure}
    expected = br.hypergradient(of_losses(**losses), dicts(), dicts(), METHODS[method]()).total
    problem = of_losses(**{**losses, edited: in_place}, verify=verify)
    batches, said = (dicts(), dicts()), ""
    for _ in range(2):  # the second call sees the edited batch
        try:
            found = br.hypergradient(problem, *batches, METHODS[method]()).total
        except br.Error as error:
            said = str(error)
            break
        assert all(torch.equal(found[n], expected[n]) for n in found)
    assert f"{edited} must leave its batch as it is; it changed batch['x'] in place" in said


@pytest.mark.parametrize("method", METHODS)
def test_an_edit_that_changes_nothing_when_repeated_is_allowed(method):
    def marked(model, hyper, b):
        b["y"][b["y"] < 0.0] = 0.0
        return F.mse_loss(model(b["x"]), b["y"]) + hyper(model)

    def apart(model, hyper, b):
        return F.mse_loss(model(b["x"]), b["y"].clamp(min=0.0)) + hyper(model)

    found = br.hypergradient(of_losses(marked, marked), dicts(), dicts(), METHODS[method]()).total
    expected = br.hypergradient(of_losses(apart, apart), dicts(), dicts(), METHODS[method]()).total
    assert all(torch.equal(found[n], expected[n]) for n in found)


@pytest.mark.parametrize("method", METHODS)
def test_lists_and_dicts_of_a_batch_are_put_back(method):
    b = dicts()
    found = br.hypergradient(of_losses(replacing, replacing), b, b, METHODS[method]())
    expected = br.hypergradient(of_losses(pure, pure), dicts(), dicts(), METHODS[method]())
    assert all(torch.equal(found.total[n], expected.total[n]) for n in found.total)
    assert list(b) == ["x", "y", "more"]
    assert torch.equal(b["x"], dicts()["x"])
    assert b["more"] == []


@pytest.mark.parametrize(
    ("wrap", "place"),
    [(itertools.cycle, "batch of type cycle"), (lambda x: {"rows": iter(x)}, "batch\\['rows'\\]")],
)
def test_a_batch_that_yields_other_data_in_each_pass_is_refused(wrap, place):
    model = nn.Linear(3, 3)

    def train_loss(model, decay, batch):
        x, y = next(batch["rows"] if isinstance(batch, dict) else batch)
        return F.mse_loss(model(x), y) + decay(model)

    def val_loss(model, decay, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    problem = br.Problem(model, WeightDecay(model), train_loss, val_loss)
    with pytest.raises(br.errors.ArgumentTypeError, match=place):
        br.hypergradient(problem, wrap([batch(), batch()]), batch(), br.Implicit())


# --- curvature that a split or autograd would lose ---------------------------------------------------------


@pytest.mark.parametrize("curvature", [br.GaussNewton, br.KFAC])
@pytest.mark.parametrize(
    ("outputs", "both"),
    [
        (lambda y: (y[:, :1], [y[:, 1:]]), lambda o: torch.cat([o[0], o[1][0]], 1)),
        (lambda y: {"a": y[:, :1], "b": {"c": y[:, 1:]}}, lambda o: torch.cat([o["a"], o["b"]["c"]], 1)),
        (lambda y: [None, (y,), "text"], lambda o: o[1][0]),
    ],
    ids=["list in a tuple", "dict in a dict", "beside other things"],
)
def test_nested_outputs_are_those_in_one_tensor(curvature, outputs, both):
    problem = of_losses(pure, pure)
    given = dicts()

    def found(predict, loss):
        method = br.Implicit(br.Exact(damping=0.1), curvature(predict, loss, problem.hyper))
        return br.hypergradient(problem, given, given, method).total

    def fit(y, b):
        return F.mse_loss(y, b["y"])

    flat = found(lambda m, h, b: m(b["x"] / 1.5), fit)
    nested = found(lambda m, h, b: outputs(m(b["x"] / 1.5)), lambda o, b: fit(both(o), b))
    assert all(torch.allclose(nested[n], flat[n], rtol=1e-10) for n in flat)


@pytest.mark.parametrize("curvature", [br.GaussNewton, br.KFAC])
def test_a_loss_of_outputs_that_reads_weights_is_refused(curvature):
    problem, b = of_losses(pure, pure), dicts()
    body, head = problem.model[:2], problem.model[2]
    parts = (
        lambda m, h, b: body(b["x"] / 1.5),
        lambda o, b: F.mse_loss(head(o), b["y"]),
        problem.hyper,
    )
    with pytest.raises(br.Error, match=r"through the outputs.*2\.weight"):
        br.hypergradient(problem, b, b, br.Implicit(br.Exact(damping=0.1), curvature(*parts)))


@pytest.mark.parametrize(
    ("penalty", "right"),
    [
        (lambda w: (w.abs() ** 2).sum(), False),
        (lambda w: w.norm() ** 2, False),
        (lambda w: w.square().sum(), True),
        (lambda w: w.abs().pow(3).sum(), True),
        (lambda w: w.abs().sum(), True),
    ],
    ids=["abs squared", "norm squared", "square", "cube", "lasso"],
)
def test_the_square_of_an_absolute_value_at_zero(penalty, right):
    """Torch's second derivative of it is 0 there instead of 2."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    nn.init.zeros_(model.bias)
    hyper = nn.ParameterDict({"log": nn.Parameter(torch.tensor(-1.0).double())})

    def fit(m, h, b):
        return F.mse_loss(m(b["x"]), b["y"][:, :2])

    problem = br.Problem(
        model, hyper, lambda m, h, b: fit(m, h, b) + h["log"].exp() * sum(map(penalty, m.parameters())), fit
    )
    method = br.Implicit(br.Exact(damping=0.1))
    if right:
        br.hypergradient(problem, dicts(), dicts(), method)
        return
    with pytest.raises(br.Error, match=r"exactly zero.*x\.square\(\)"):
        br.hypergradient(problem, dicts(), dicts(), method)
    nn.init.constant_(model.bias, 0.1)
    br.hypergradient(problem, dicts(), dicts(), method)


@pytest.mark.parametrize("method", METHODS)
def test_rows_divided_by_their_counts_are_refused(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(9, 1)).double()

    def fit(m, h, b):
        return m(b).square().mean()

    decay = WeightDecay(model, initial=0.3)
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m), fit)
    b = torch.randint(4, (8, 3))
    with pytest.raises(br.Error, match="scale_grad_by_freq"):
        br.hypergradient(problem, b, b, METHODS[method]())
