"""Weights that an ℓ1 penalty holds at zero: against re-solved problems, and against problems without these weights."""

import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

import bestresponse as br
import cases
from bestresponse.curvatures.several_batches import linear_system
from bestresponse.hyperparameters import WeightDecay, orthant_wise

N, D = 40, 12


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(N + 30, D + 1, generator=generator, dtype=torch.float64)
    x = numbers[:, :D]
    y = x[:, :4] @ torch.tensor([2.0, -1.0, 0.7, -1.5], dtype=torch.float64) + 0.5 * numbers[:, D]
    return (x[:N], y[:N]), (x[N:], y[N:])


TRAIN, VAL = data()


class Linear(nn.Module):
    def __init__(self, size=D):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return x @ self.w


def fit(model, hyper, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def solved(l1, l2=0.0, train=TRAIN):
    """argmin_w mean (Xw − y)² + Σ l1_i |w_i| + ½ Σ l2_i w_i², by steps that shrink, to rounding."""
    x, y = train
    gram = 2 * x.T @ x / len(y) + torch.diag(torch.as_tensor(l2).expand(x.shape[1]))
    along, step = 2 * x.T @ y / len(y), 1 / float(torch.linalg.eigvalsh(gram)[-1])
    w = torch.zeros_like(along)
    for _ in range(800):
        w = w + step * (along - gram @ w)
        w = w.sign() * (w.abs() - step * torch.as_tensor(l1)).clamp(min=0)
    return w


def of_validation(w):
    return float((VAL[0] @ w - VAL[1]).square().mean())


@functools.cache
def expected_of(case, rate):
    *_, solve, start = case(rate)
    return difference(solve, start)


def difference(solve, log_rates, step=1e-5):
    """dL_V/dλ by re-solving, for each entry of the logarithmic rates."""
    slopes = []
    for i in range(len(log_rates)):
        ends = []
        for sign in (1, -1):
            moved = log_rates.clone()
            moved[i] += sign * step
            ends.append(of_validation(solve(moved.exp())))
        slopes.append((ends[0] - ends[1]) / (2 * step))
    return torch.tensor(slopes)


def lasso(rate):
    model = Linear()
    decay = WeightDecay(model, per="global", power=1, initial=rate)
    start = torch.tensor([rate]).log()
    return model, decay, lambda rates: solved(rates), start


def weighted_lasso(rate):
    model = Linear()
    decay = WeightDecay(model, per="weight", power=1, initial=rate)
    with torch.no_grad():
        decay.log_decay.w += torch.linspace(-1, 1, D)
    return model, decay, lambda rates: solved(rates), decay.log_decay.w.detach().clone()


def elastic_net(rate):
    model = Linear()
    decays = nn.ModuleList([WeightDecay(model, "global", p, initial=rate) for p in (1, 2)])
    return model, decays, lambda rates: solved(*rates), torch.tensor([rate, rate]).log()


def penalised(model, hyper, batch):
    parts = hyper if isinstance(hyper, nn.ModuleList) else [hyper]
    return fit(model, hyper, batch) + sum(part(model) for part in parts)


def rest(model, hyper, batch):
    return penalised(model, hyper, batch) - fit(model, hyper, batch)


def predict(model, hyper, batch):
    return model(batch[0])


def squares(outputs, batch):
    return (outputs - batch[1]).square().mean()


def problem_of(case, rate):
    model, hyper, solve, start = case(rate)
    with torch.no_grad():
        model.w.copy_(solve(start.exp()))
    return br.Problem(model, hyper, penalised, fit)


def total(problem, method, train=TRAIN):
    with warnings.catch_warnings():
        warnings.simplefilter("error", br.BestResponseWarning)
        h = br.hypergradient(problem, train, VAL, method)
    return torch.cat([x.reshape(-1) for x in h.total.values()]), h


METHODS = {
    "cg": br.Implicit(br.ConjugateGradient(60, 1e-10)),
    "exact": br.Implicit(br.Exact()),
    "minres": br.Implicit(br.MINRES(60, 1e-10)),
    "gauss-newton": br.Implicit(br.ConjugateGradient(60, 1e-10), br.GaussNewton(predict, squares, rest)),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rate", [0.15, 0.6])
@pytest.mark.parametrize("case", [lasso, weighted_lasso, elastic_net])
def test_as_re_solving_says(case, rate, method):
    problem = problem_of(case, rate)
    held = int((problem.model.w == 0).sum())
    assert 0 < held < D
    got, h = total(problem, METHODS[method])
    expected = expected_of(case, rate)
    assert float((got - expected).norm() / expected.norm()) < 1e-5
    assert f"{held} weights held at zero" in h.solve.detail


def without_zeros(problem):
    """The same problem for the weights that are not zero alone."""
    free = problem.model.w.detach() != 0
    model = Linear(int(free.sum()))
    decay = WeightDecay(model, per="global", power=1)
    with torch.no_grad():
        model.w.copy_(problem.model.w[free])
        decay.log_decay.copy_(problem.hyper.log_decay)
    train, val = (TRAIN[0][:, free], TRAIN[1]), (VAL[0][:, free], VAL[1])
    return br.Problem(model, decay, penalised, fit), train, val


def each(model, hyper, batch):
    return (model(batch[0]) - batch[1]).square()


GRID = {
    "neumann": lambda d: br.Implicit(br.Neumann(30)),
    "identity": lambda d: br.Implicit(br.Identity()),
    "damped": lambda d: br.Implicit(br.Exact(damping=0.3)),
    "nystrom": lambda d: br.Implicit(br.Nystrom(rank=D, damping=0.1)),
    "gmres": lambda d: br.Implicit(br.solvers.GMRES(30)),
    "default": lambda d: br.Implicit(),
    "diagonal": lambda d: br.Implicit(br.ConjugateGradient(30, 1e-12, diagonal=True)),
    "rest by difference": lambda d: br.Implicit(br.Exact(), br.GaussNewton(predict, squares)),
    "rest": lambda d: br.Implicit(br.Exact(), br.GaussNewton(predict, squares, d)),
    "fisher": lambda d: br.Implicit(br.Exact(damping=0.1), br.EmpiricalFisher(each, d)),
    "kfac": lambda d: br.Implicit(br.Exact(damping=0.1), br.KFAC(predict, squares, d)),
    "difference": lambda d: br.Implicit(br.Exact(), br.FiniteDifference(1e-6)),
}


@pytest.mark.parametrize("name", GRID)
def test_as_without_the_weights_that_are_held(name):
    problem = problem_of(lasso, 0.3)
    other, train, val = without_zeros(problem)
    got, _ = total(problem, GRID[name](problem.hyper))
    expected = br.hypergradient(other, train, val, GRID[name](other.hyper)).total["log_decay"]
    # Those that choose a step or a damping by random directions choose another one; these have converged.
    torch.testing.assert_close(
        got[0], expected, rtol=1e-4 if name in ("neumann", "default") else 1e-6, atol=0
    )


WRITTEN = {
    "abs": lambda w, r: r * w.abs().sum(),
    "in parts": lambda w, r: r * (sum(x.abs().sum() for x in w.split(5)) / 2 + w.view(3, -1).T.norm(1) / 2),
    "inside": lambda w, r: (-r * w[None]).abs().sum(),
    "norm": lambda w, r: r * torch.linalg.vector_norm(w, ord=1),
    "norms of rows": lambda w, r: r * w.view(4, 3).norm(1, dim=-1).sum(),
    "l1_loss": lambda w, r: r * F.l1_loss(w, torch.zeros_like(w), reduction="sum"),
    "vector": lambda w, r: r * parameters_to_vector([w, w]).abs().mean() * len(w),
    "flat net": lambda w, r: r * (torch.cat([w[:3], w[3:]]).float().abs().sum().double() + w.abs().sum()) / 2,
    "two terms": lambda w, r: 0.25 * r * w.abs().sum() + 0.75 * r * w.abs().sum(),
}


def written_problem(term, rate, weights=None):
    model, hyper = Linear(), nn.ParameterDict({"log": nn.Parameter(torch.tensor(rate).log())})
    with torch.no_grad():
        model.w.copy_(solved(rate) if weights is None else weights)
    return br.Problem(model, hyper, lambda m, h, b: fit(m, h, b) + term(m.w, h["log"].exp()), fit)


@pytest.mark.parametrize("form", WRITTEN)
def test_a_penalty_that_the_loss_writes_out(form):
    for rate in (0.15, 0.6):
        problem = written_problem(WRITTEN[form], rate)
        got, h = total(problem, br.Implicit(br.Exact()))
        torch.testing.assert_close(got, expected_of(lasso, rate), rtol=1e-5, atol=0)
        assert "held at zero" in h.solve.detail


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("curvature", [br.Hessian(), br.FiniteDifference(1e-6)])
def test_several_batches_decide_together(recompute, curvature):
    """Some weights are held by the mean gradient that a half of the batch would release."""
    problem = problem_of(lasso, 0.15)
    halves = [(TRAIN[0][i::2], TRAIN[1][i::2]) for i in (0, 1)]
    got, _ = total(problem, br.Implicit(br.Exact(), curvature), br.Batches(halves, recompute=recompute))
    torch.testing.assert_close(got, expected_of(lasso, 0.15), rtol=1e-4, atol=0)
    alone = br.hypergradient(problem, halves[0], VAL, br.Implicit(br.Exact()))
    whole = br.hypergradient(problem, TRAIN, VAL, br.Implicit(br.Exact()))
    assert alone.solve.detail != whole.solve.detail


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("curvature", [br.Hessian(), br.GaussNewton()])
@pytest.mark.parametrize("penalised", [0, 1])
def test_a_penalty_in_one_of_several_batches(recompute, curvature, penalised):
    """The gradient that holds weights has parts of batches without the penalty."""
    halves = [(TRAIN[0][i::2], TRAIN[1][i::2]) for i in (0, 1)]

    def train_loss(model, hyper, batch):
        data = F.mse_loss(model(batch[0]), batch[1])
        return data + 2 * hyper["log"].exp() * model.w.abs().sum() if batch is halves[penalised] else data

    for rate in (0.15, 0.6):
        problem = written_problem(WRITTEN["abs"], rate)
        problem = br.Problem(problem.model, problem.hyper, train_loss, fit)
        got, _ = total(problem, br.Implicit(br.Exact(), curvature), br.Batches(halves, recompute=recompute))
        torch.testing.assert_close(got, expected_of(lasso, rate), rtol=1e-4, atol=0)


@pytest.mark.parametrize("rates", [(0.05, 0.01), (0.01, 0.05), (0.3, 0.3), (2.0, 2.0)])
@pytest.mark.parametrize("dims", [(1, 0), (0, 1), (1, 1)])
def test_norms_in_several_batches(dims, rates):
    """Groups of different kinds stay apart, and rates of equal ones add up, also within one loss."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight[0] = 0.0
        model.weight[:, 1] = 0.0
    batches = [
        (torch.randn(8, 4), torch.randn(8, 3), dim, rate) for dim, rate in zip(dims, rates, strict=True)
    ]

    def each(model, hyper, batch):
        x, y, dim, rate = batch
        return F.mse_loss(model(x), y) + hyper["a"] * rate * model.weight.norm(dim=dim).sum()

    def joint(model, hyper, _):
        return sum(each(model, hyper, batch) for batch in batches) / 2

    def once(model, hyper, _):
        data = sum(F.mse_loss(model(x), y) for x, y, *_ in batches) / 2
        return data + hyper["a"] * sum(rates) / 2 * model.weight.norm(dim=dims[0]).sum()

    found = []
    losses = [(each, br.Batches(batches)), (joint, None), *([(once, None)] if dims[0] == dims[1] else [])]
    for loss, batch in losses:
        problem = br.Problem(
            model, nn.ParameterDict({"a": torch.ones(())}), loss, lambda m, h, b: m.weight.sum()
        )
        with problem.undisturbed(None) as passes:
            system = linear_system(br.Hessian(), passes, batch)
            found.append(system.responding({n: torch.ones_like(problem.weights[n]) for n in system.names}))
    assert all(torch.equal(x, found[0][n]) for other in found[1:] for n, x in other.items())
    assert bool((found[0]["weight"] == 0).any()) == (max(rates) > 1.0)


def test_weights_held_elsewhere():
    """An ℓ1 penalty towards fixed weights holds weights there; one towards hyperparameters is named."""
    centre = torch.linspace(-1, 1, D)
    train = TRAIN[0], TRAIN[1] - TRAIN[0] @ centre
    got, h = total(
        written_problem(lambda w, r: r * (w - centre).abs().sum(), 0.6, centre + solved(0.6, train=train)),
        br.Implicit(br.Exact()),
    )
    ends = [of_validation(centre + solved(0.6 * torch.tensor(x).exp(), train=train)) for x in (1e-5, -1e-5)]
    assert float(got) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4)
    assert "held at a kink" in h.solve.detail
    problem = written_problem(lambda w, r: (w - r).abs().sum(), 0.6, torch.full((D,), 0.6))
    with torch.no_grad():
        problem.model.w.fill_(problem.hyper["log"].exp())
    with pytest.warns(br.BestResponseWarning, match="abs of sums or differences"):
        br.hypergradient(problem, TRAIN, VAL, br.Implicit())


def test_sama_leaves_them_out():
    model, problem, _ = tuned(OPTIMIZERS["adam"], 0.3)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    with torch.no_grad():
        model.w.copy_(solved(0.3) + 0.01 * (solved(0.3) != 0))
    optimizer.zero_grad()
    problem.train_loss(model, problem.hyper, TRAIN).backward(inputs=[model.w])
    optimizer.step()
    with torch.no_grad():
        model.w.copy_(solved(0.3) + 0.01 * (solved(0.3) != 0))
    data = nn.ParameterDict({"y": nn.Parameter(TRAIN[1].clone())})
    problem.hyper.requires_grad_(False)  # a constant of the second problem
    labelled = br.Problem(model, data, lambda m, h, b: fit(m, h, (b[0], h["y"])) + problem.hyper(m), fit)
    v = br.hypergradient(labelled, TRAIN, VAL, br.SAMA(curvature=br.Hessian()), weight_optimizer=optimizer)
    free = model.w.detach() != 0
    span = TRAIN[0][:, free]
    moved = v.total["y"]
    assert moved.norm() > 0
    torch.testing.assert_close(span @ torch.linalg.lstsq(span, moved).solution, moved)


def group_lasso(rate, l1=0.0):
    """argmin of the fit, rate Σ_G ‖w_G‖ over groups of three, and l1 ‖w‖₁."""
    x, y = TRAIN
    gram, along = 2 * x.T @ x / len(y), 2 * x.T @ y / len(y)
    step = 1 / float(torch.linalg.eigvalsh(gram)[-1])
    w = torch.zeros_like(along)
    for _ in range(800):
        w = w + step * (along - gram @ w)
        w = (w.sign() * (w.abs() - step * l1).clamp(min=0)).view(-1, 3)
        size = w.norm(dim=1, keepdim=True)
        w = (w * (1 - step * rate / size.clamp(min=1e-300)).clamp(min=0)).view(-1)
    return w


@pytest.mark.parametrize(("rate", "l1"), [(0.6, 0.0), (0.2, 0.3)])
def test_groups(rate, l1):
    step = 1e-5
    w = group_lasso(rate, l1)
    assert 0 < int((w.view(-1, 3).norm(dim=1) == 0).sum()) < 4
    assert l1 == 0 or int((w == 0).sum()) % 3

    def term(w, r):
        return r * w.view(-1, 3).norm(dim=1).sum() + l1 * w.abs().sum()

    got, _ = total(written_problem(term, rate, w), br.Implicit(br.Exact()))
    ends = [of_validation(group_lasso(rate * torch.tensor(x).exp(), l1)) for x in (step, -step)]
    assert float(got) == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4)


class LowRank(nn.Module):
    """A frozen layer with an update B A, where B is zero at first, and a bias of zero."""

    def __init__(self):
        super().__init__()
        self.A, self.B = nn.Parameter(torch.randn(2, D)), nn.Parameter(torch.zeros(3, 2))
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return (x @ self.A.T) @ self.B.T + self.bias


def twin(term):
    torch.manual_seed(1)
    model = LowRank()
    hyper = nn.ParameterDict({"log": nn.Parameter(torch.zeros(()))})

    def loss(m, h, b):
        return (m(b[0]) - b[1][:, None]).square().mean() + h["log"].exp() * term(m, b)

    return br.Problem(model, hyper, loss, lambda m, h, b: (m(b[0]) - b[1][:, None]).square().mean())


SMOOTH = {
    "squares": lambda m, b: sum(w.square().sum() for w in m.parameters()),
    "abs of other weights": lambda m, b: m.A.abs().sum() + m.B.square().sum() + m.bias.square().sum(),
    "abs of outputs": lambda m, b: m(b[0]).abs().mean() + m.B.square().sum() + m.bias.square().sum(),
    "abs of activations": lambda m, b: F.relu(b[0] @ m.A.T).abs().mean() + m.B.square().sum(),
    "powers of abs": lambda m, b: m.B.abs().pow(3).sum() + m.A.square().sum() + m.bias.square().sum(),
    "products": lambda m, b: (m.B @ m.A).abs().mean() + sum(w.square().sum() for w in m.parameters()),
    "normalised": lambda m, b: F.normalize(m.B, dim=1).sum() + m.A.square().sum() + m.bias.square().sum(),
    "a weak penalty": lambda m, b: 1e-3 * m.B.abs().sum() + m.A.square().sum() + 1e-3 * m.bias.abs().sum(),
}


@pytest.mark.parametrize("form", SMOOTH)
def test_zeros_that_nothing_holds_respond(form):
    problem = twin(SMOOTH[form])
    assert "held" not in total(problem, br.Implicit(br.Identity()))[1].solve.detail
    with problem.undisturbed() as passes:
        assert br.Hessian().linearise(passes, TRAIN).kinks.held() == {}


def test_combinations_of_weights_on_a_kink_are_named():
    """The fused lasso: differences of weights are held, and not weights."""

    def term(w, r):
        return r * (w[1:] - w[:-1]).abs().sum()

    problem = written_problem(term, 0.3, torch.ones(D))
    with pytest.warns(br.BestResponseWarning, match="abs of sums or differences"):
        br.hypergradient(problem, TRAIN, VAL, br.Implicit())
    quiet = written_problem(term, 0.3, torch.linspace(0, 1, D).square())
    total(quiet, br.Implicit(br.Exact()))


def test_a_warm_start_goes_on_when_others_are_held():
    method = br.Implicit(br.ConjugateGradient(60, 1e-10), warm_start=True)
    problem = problem_of(lasso, 0.15)
    for rate in (0.15, 0.6, 0.15):
        with torch.no_grad():
            problem.hyper.log_decay.fill_(torch.tensor(rate).log())
            problem.model.w.copy_(solved(rate))
        got, h = total(problem, method)
        torch.testing.assert_close(got, expected_of(lasso, rate), rtol=1e-5, atol=0)
    assert h.solve.warm


def test_all_weights_held():
    problem = problem_of(lasso, 10.0)
    for solver in (br.Exact(), br.ConjugateGradient(5), br.MINRES(5), br.Neumann(3)):
        got, _ = total(problem, br.Implicit(solver))
        assert got.tolist() == [0.0]


def test_the_preconditioner_of_a_curvature():
    problem = problem_of(lasso, 0.3)
    method = br.Implicit(
        br.ConjugateGradient(60, 1e-10, preconditioner=br.KFAC(predict, squares, problem.hyper))
    )
    other = br.hypergradient(problem, TRAIN, VAL, br.Implicit(br.Exact()))
    got, _ = total(problem, method)
    torch.testing.assert_close(got[0], other.total["log_decay"], rtol=1e-7, atol=0)


OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, 0.05, momentum=0.9),
    "adam": lambda weights: torch.optim.Adam(weights, 0.05),
}


@functools.cache
def path():
    """Rates of the lasso's path from the one that cross-validation chooses, and the weights there."""
    from sklearn.linear_model import LassoCV, lasso_path

    x, y = (part.numpy() for part in TRAIN)
    chosen = LassoCV(fit_intercept=False, cv=5, tol=1e-10).fit(x, y)
    alphas, weights, _ = lasso_path(
        x, y, alphas=chosen.alpha_ * 2.0 ** torch.tensor([0, 5, 6, 7]).numpy(), tol=1e-12
    )
    at = {float(alpha): torch.from_numpy(w.copy()) for alpha, w in zip(alphas, weights.T, strict=True)}
    torch.testing.assert_close(at[float(chosen.alpha_)], torch.from_numpy(chosen.coef_), rtol=1e-4, atol=1e-5)
    assert sum(int((w == 0).sum()) for w in at.values()) > D
    return at


@pytest.mark.parametrize(
    "name", ["sgd", *(pytest.param(x, marks=pytest.mark.slow) for x in OPTIMIZERS if x != "sgd")]
)
def test_training_ends_on_the_path_of_the_lasso(name):
    """With zeros where the path has zeros, from weights of either sign."""
    for alpha, expected in path().items():
        model, problem, tuner = tuned(OPTIMIZERS[name], 2 * alpha)
        tuner.retrain([TRAIN], 400, lambda model: nn.init.uniform_(model.w, -1, 1))
        torch.testing.assert_close(model.w.detach(), expected, rtol=0, atol=1e-6)
        assert ((model.w == 0) == (expected == 0)).all()


def tuned(optimizer, rate, hyper_rate=0.0):
    model = Linear()
    decay = WeightDecay(model, per="global", power=1, initial=rate)
    problem = br.Problem(model, decay, penalised, fit)
    steps = optimizer(model.parameters()), torch.optim.SGD(decay.parameters(), hyper_rate)
    return model, problem, br.Tuner(problem, *steps, br.Implicit(br.ConjugateGradient(30)), weight_steps=20)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_loop_of_ones_own_makes_the_steps_of_the_tuner(clip):
    model, problem, tuner = tuned(OPTIMIZERS["momentum"], 0.4)
    tuner.clip_weights = clip
    start = torch.linspace(-1, 1, D)
    tuner.retrain([TRAIN], 60, lambda model: model.w.copy_(start))
    ended = model.w.detach().clone()
    with torch.no_grad():
        model.w.copy_(start)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for _ in range(60):
        optimizer.zero_grad()
        problem.train_loss(model, problem.hyper, TRAIN).backward(inputs=[model.w])
        with orthant_wise(model, problem.hyper):
            if clip:
                nn.utils.clip_grad_norm_([model.w], clip)
            optimizer.step()
    assert torch.equal(model.w.detach(), ended)
    assert (ended == 0).any()


def test_a_penalty_counts_once():
    model = Linear()
    decays = cases.Around(WeightDecay(model, per="global", power=1))
    problem = br.Problem(model, decays, penalised, fit)
    with torch.no_grad():
        model.w.copy_(solved(float(decays.inner.log_decay.exp())))
        model.w[0] = 0.0
    total(problem, br.Implicit(br.Exact()))  # which compares the slopes


def test_what_a_step_may_do_to_a_weight():
    """Stop at zero, stay there, or leave on the side that the gradient points to."""
    model = Linear(6)
    decay = WeightDecay(model, per="weight", power=1, initial=0.5)
    other = WeightDecay(model, per="global", power=1, initial=0.5)
    with torch.no_grad():
        model.w.copy_(torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0, 0.0]))
    model.w.grad = torch.tensor([0.0, 0.0, 0.9, -1.1, 1.1, -1.1])
    with orthant_wise(model, decay, other), torch.no_grad():
        model.w.copy_(torch.tensor([-0.1, -0.1, -0.1, 0.1, 0.1, torch.nan]))
    assert model.w[:5].tolist() == [0.0, -0.1, 0.0, 0.1, 0.0]
    assert model.w[5].isnan()
    torch.testing.assert_close(model.w.grad, torch.tensor([0.0, 0.0, 0.0, -0.1, 0.1, -0.1]))
    model.w.grad.fill_(torch.inf)
    with orthant_wise(model, decay):  # as where a GradScaler leaves the step out
        pass
    assert (model.w[1], model.w[3]) == (-0.1, 0.1)
    model.w.grad.fill_(0.9)
    with orthant_wise(model, decay), torch.no_grad():
        model.w.copy_(torch.tensor([0.0, 0.0, -0.1, 0.0, 0.0, 0.0]))
    assert model.w[2] == -0.1
    model.w.grad = None
    with pytest.raises(br.Error, match="after the backward pass"), orthant_wise(model, decay):
        pass
    with orthant_wise(model, WeightDecay(model)):
        pass


def test_a_tuner_finds_the_rate_of_the_lasso():
    """The weights keep their zeros, and the rate ends where the validation loss of re-solved lassos is least."""
    model, problem, tuner = tuned(OPTIMIZERS["sgd"], 0.05, hyper_rate=6.0)
    row = tuner.fit([TRAIN], [VAL], 40)[-1]
    rate = float(problem.hyper.log_decay.detach().exp())
    assert (model.w == 0).any()
    assert row["hypergradient_norm"] < 1e-4
    least = of_validation(solved(rate))
    assert least < min(of_validation(solved(rate * x)) for x in (0.9, 1.1))


def test_a_penalty_with_another_factor_is_named():
    model, problem, _ = tuned(OPTIMIZERS["sgd"], 0.4)
    half = br.Problem(model, problem.hyper, lambda m, h, b: fit(m, h, b) + 0.5 * h(m), fit)
    with torch.no_grad():
        model.w.copy_(solved(0.2))
    with pytest.warns(br.BestResponseWarning, match="factor of one"):
        h = br.hypergradient(half, TRAIN, VAL, br.Implicit(br.Exact()))
    expected = difference(solved, torch.tensor([0.2]).log())
    torch.testing.assert_close(h.total["log_decay"], expected[0], rtol=1e-5, atol=0)


def test_a_penalty_on_a_part_of_the_model_is_named():
    model = nn.Sequential(Linear())
    decay = WeightDecay(model[0], per="global", power=1)
    problem = br.Problem(model, decay, lambda m, h, b: fit(m, h, b) + h(m[0]), fit)
    optimizers = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(decay.parameters(), 0.1)
    with pytest.warns(br.BestResponseWarning, match="a part of the model"):
        br.Tuner(problem, *optimizers).fit([TRAIN], [VAL], 1)


@pytest.mark.slow
def test_the_check_of_a_lasso():
    """No singular curvature, a stationary point, and the slope that re-solving finds."""
    problem = problem_of(lasso, 0.3)
    check = br.diagnostics.check(problem, TRAIN, VAL)
    assert not [f for f in check.findings if f.level in ("warning", "error")]
    assert check.retraining.slope == pytest.approx(abs(float(expected_of(lasso, 0.3))), rel=1e-2)


def test_the_exact_solver_leaves_out_what_is_apart():
    """A weight with zeros in its row, its column and the right-hand side; one that b asks for lowers the rank."""
    A = torch.diag(torch.tensor([2.0, 0.0, 4.0]))

    def product(v):
        return {"w": A @ v["w"]}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = br.Exact().solve(product, {"w": torch.tensor([2.0, 0.0, 2.0])})
    torch.testing.assert_close(solution.x["w"], torch.tensor([1.0, 0.0, 0.5]))
    assert solution.report.curvature == pytest.approx((2.0, 4.0))
    with pytest.warns(br.BestResponseWarning, match="rank 2 of 3"):
        br.Exact().solve(product, {"w": torch.tensor([2.0, 1e-3, 2.0])})
