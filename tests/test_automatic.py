"""`Implicit()`: the Hessian where it has no negative curvature, else Gauss-Newton."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
import cases

pytestmark = pytest.mark.usefixtures("verifying")


def classes(n=24):
    return torch.randn(n, 5), torch.randint(3, (n,))


def problem_of(loss=F.cross_entropy, hidden=nn.Tanh, seed=0, decay=1e-3):
    """An untrained network with a decay for each weight; its Hessian is indefinite."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), hidden(), nn.Linear(8, 3))
    hyper = br.hyperparameters.WeightDecay(model, per="weight", initial=decay)
    fit = lambda m, h, b: loss(m(b[0]), b[1])  # noqa: E731
    return br.Problem(model, hyper, lambda m, h, b: fit(m, h, b) + h(m), fit)


def by_hand(outputs, targets):
    return -outputs.log_softmax(1)[torch.arange(len(targets)), targets].mean()


def totals(h):
    return torch.cat([x.flatten() for x in h.total.values()])


def calls(problem, batches, method):
    """A hypergradient after each of some steps of the weights."""
    found = []
    for number, batch in enumerate(batches):
        cases.train(problem, batch, torch.optim.SGD(problem.weights.values(), 0.05), 3)
        found.append(br.hypergradient(problem, batch, batch, method, seed=number))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_it_is_gauss_newton_from_the_first_negative_curvature_on(seed):
    found, expected, spent = [], [], br.Implicit(curvature=br.Hessian())
    for method, into in ((br.Implicit(), found), (br.Implicit(curvature=br.GaussNewton()), expected)):
        problem = problem_of(seed=seed)
        into += calls(problem, [classes() for _ in range(4)], method)
    for h, other in zip(found, expected, strict=True):
        assert torch.equal(totals(h), totals(other))
        assert h.verification == "verified"
        assert "Gauss-Newton, since the Hessian had negative curvature" in h.solve.detail
        assert "outputs found at cross_entropy" in h.solve.detail
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (first,) = calls(problem_of(seed=seed), [classes()], spent)
    assert first.solve.indefinite
    counts = [h.solve.products for h in expected]
    assert [h.solve.products for h in found] == [counts[0] + first.solve.products, *counts[1:]]


@pytest.mark.parametrize("make", [cases.softmax, cases.ridge])
@pytest.mark.parametrize("scale", [-2.0, 0.5])
def test_it_is_the_hessian_at_a_minimum(make, scale):
    case = make(scale)
    method = br.Implicit()
    for _ in range(12):
        h = br.hypergradient(case.problem, case.train, case.val, method)
    plain = br.Implicit(curvature=br.Hessian())
    for _ in range(12):
        other = br.hypergradient(case.problem, case.train, case.val, plain)
    for name, expected in case.expected.items():
        torch.testing.assert_close(h.total[name], expected, rtol=1e-3, atol=1e-4)
        assert torch.equal(h.total[name], other.total[name])
    assert not case.problem.state(method.curvature).memory


def test_a_network_at_a_strict_minimum_keeps_the_hessian():
    """Its hypergradient is that of the exact Hessian, which Gauss-Newton is not."""
    problem, batch = problem_of(decay=0.02), classes()
    cases.train(problem, batch, torch.optim.Adam(problem.weights.values(), 0.01), 3000)
    exact = totals(br.hypergradient(problem, batch, batch, br.Implicit(br.Exact())))
    rough = totals(br.hypergradient(problem, batch, batch, br.Implicit(br.Exact(), br.GaussNewton())))
    method = br.Implicit()
    for _ in range(30):
        h = br.hypergradient(problem, batch, batch, method)
    assert not h.solve.indefinite
    assert (totals(h) - exact).norm() < 0.05 * exact.norm()
    assert (rough - exact).norm() > 0.1 * exact.norm()


def test_the_hessian_stays_where_no_loss_function_is_called():
    batches = [classes() for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method in (br.Implicit(), br.Implicit(curvature=br.Hessian())):
            problem = problem_of(by_hand)
            found = calls(problem, batches, method)
            if type(method.curvature) is not br.Hessian:
                own = found
                assert problem.state(method.curvature).memory == {"gauss_newton": False}
    assert own[0].solve.indefinite
    for h, other in zip(own, found, strict=True):
        assert torch.equal(totals(h), totals(other))
        assert h.solve.products == other.solve.products
        assert "Gauss-Newton" not in h.solve.detail


def test_a_batch_without_a_loss_function_has_its_hessian():
    sometimes = lambda o, y: F.cross_entropy(o, y) if len(y) == 24 else by_hand(o, y)  # noqa: E731
    problem, method = problem_of(sometimes), br.Implicit()
    _, h, after = calls(problem, [classes(), classes(20), classes()], method)
    assert "the Hessian for a batch: GaussNewton() looks for" in h.solve.detail
    assert after.solve.detail.startswith("Gauss-Newton, since")


def test_several_batches_one_at_a_time():
    pieces = [classes() for _ in range(3)]
    found = []
    for recompute in (False, True):
        batches = br.Batches(pieces, recompute=recompute)
        found.append(br.hypergradient(problem_of(), batches, pieces[0], br.Implicit()))
    torch.testing.assert_close(totals(found[0]), totals(found[1]))
    assert all("Gauss-Newton" in h.solve.detail for h in found)


def test_the_choice_is_a_part_of_the_state(tmp_path):
    def tuner():
        problem = problem_of()
        hyper = torch.optim.Adam(problem.hyperparameters.values(), 0.1)
        return br.Tuner(problem, torch.optim.SGD(problem.weights.values(), 0.1), hyper, br.Implicit())

    torch.manual_seed(1)
    batch = classes()
    whole, first, second = tuner(), tuner(), tuner()
    whole.fit([batch], [batch], 6)
    first.fit([batch], [batch], 3)
    first.save(tmp_path / "run.pt")
    second.load(tmp_path / "run.pt")
    second.fit([batch], [batch], 3)
    for w, again in zip(
        whole.problem.hyperparameters.values(), second.problem.hyperparameters.values(), strict=True
    ):
        assert torch.equal(w, again)
    curvature = second.method.curvature
    assert second.problem.state(curvature).memory == {"gauss_newton": True}
    second.problem.forget(second.method)
    assert not second.problem.state(curvature).memory


def test_a_failed_call_chooses_nothing():
    problem, method, batch = problem_of(), br.Implicit(), classes()
    count = 0

    def fails(m, h, b):
        nonlocal count
        count += 1
        if count == 4:  # after the choice
            raise ValueError("stop")
        return F.cross_entropy(m(b[0]), b[1]) + h(m)

    problem.train_loss = fails
    with pytest.raises(ValueError, match="stop"):
        br.hypergradient(problem, batch, batch, method)
    assert not problem.state(method.curvature).memory
    assert problem.state(method).solution is None


def test_both_halves_share_the_choice():
    problem, batch = problem_of(), classes()
    method = br.Halves(br.Implicit())
    h = br.hypergradient(problem, batch, batch, method)
    assert "Gauss-Newton" in h.solve.detail
    assert problem.state(method.method.curvature).memory == {"gauss_newton": True}


@pytest.mark.parametrize("batched", [True, False])
def test_folds_keep_the_hessian(batched):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    hyper = br.hyperparameters.WeightDecay(model, initial=1e-3)
    fit = lambda m, h, b: F.cross_entropy(m(b[0]), b[1])  # noqa: E731
    folds = br.Folds(model, hyper, lambda m, h, b: fit(m, h, b) + h(m), fit, folds=2, batched=batched)
    pair = (classes(), classes())
    method = br.Implicit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        h = br.hypergradient(folds, pair, pair, method)
    assert h.solve.indefinite
    assert "Gauss-Newton" not in h.solve.detail


def test_a_solver_that_is_given_has_the_hessian():
    assert type(br.Implicit(br.Neumann(3)).curvature) is br.Hessian
    assert type(br.Implicit().curvature) is br.curvatures.Automatic
    assert type(br.Implicit(warm_start=False).curvature) is br.curvatures.Automatic


class Lossy(torch.autograd.Function):
    """x⁴ / 4, whose backward pass has no derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x**4 / 4

    @staticmethod
    def backward(ctx, g):
        return g * ctx.x**3


def fits(m, h, b):
    return F.cross_entropy(m(b[0]), b[1])


def penalised(m, h, b):
    return fits(m, h, b) + h["a"].exp() * sum(Lossy.apply(w).sum() for w in m.parameters())


def of_lossy_values(m, h, b):
    values = F.cross_entropy(m(b[0]), b[1], reduction="none")
    return (h["a"].exp() * Lossy.apply(values)).mean() + 0.1 * m[0].weight.square().sum()


SPLITS = {
    penalised: br.GaussNewton(
        lambda m, h, b: m(b[0]),
        lambda o, b: F.cross_entropy(o, b[1]),
        lambda m, h, b: penalised(m, h, b) - fits(m, h, b),
    ),
    of_lossy_values: br.GaussNewton(
        lambda m, h, b: (m(b[0]), h["a"]),
        lambda o, b: (o[1].exp() * Lossy.apply(F.cross_entropy(o[0], b[1], reduction="none"))).mean(),
        lambda m, h, b: 0.1 * m[0].weight.square().sum(),
    ),
}


@pytest.mark.parametrize("loss", [penalised, of_lossy_values])
@pytest.mark.parametrize("way", ["default", "found", "given", "by difference"])
def test_a_lost_derivative_past_the_network_is_refused(loss, way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    hyper = nn.ParameterDict({"a": nn.Parameter(torch.tensor(0.0))})
    problem, batch, split = br.Problem(model, hyper, loss, fits), classes(), SPLITS[loss]
    curvature = {
        "default": None,
        "found": br.GaussNewton(),
        "given": split,
        "by difference": br.GaussNewton(split.predict, split.loss),
    }[way]
    with pytest.raises(br.Error, match="Lossy"):
        br.hypergradient(problem, batch, batch, br.Implicit(curvature=curvature))


def reversed_features(m, h, b):
    features = torch.tanh(m[0](b[0]))
    turned = 2 * features.detach() - features  # the same values, and the opposite gradient
    other = F.cross_entropy(m[2](turned), 2 - b[1])
    return F.cross_entropy(m[2](features), b[1]) + h["a"].exp() * other


def detached_inside(m, h, b):
    z = torch.tanh(m[0](b[0]))
    return F.cross_entropy(m[2](z + h["a"] * z.detach().cos()), b[1])


def detached_weights(m, h, b):
    losses = F.cross_entropy(m(b[0]), b[1], reduction="none")
    return ((h["a"] * losses.detach()).sigmoid() * losses).mean()


@pytest.mark.parametrize("field", [reversed_features, detached_inside, detached_weights])
@pytest.mark.parametrize("curvature", [None, br.Hessian(), br.GaussNewton()], ids=repr)
def test_a_field_that_is_no_gradient_is_warned_of(field, curvature):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    hyper = nn.ParameterDict({"a": nn.Parameter(torch.tensor(-1.0))})
    train = lambda m, h, b: field(m, h, b) + 1e-3 * sum(w.square().sum() for w in m.parameters())  # noqa: E731
    problem, batch, method = (
        br.Problem(model, hyper, train, fits),
        classes(),
        br.Implicit(curvature=curvature),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = calls(problem, [batch] * 3, method)
    assert any("not the gradient of train_loss" in str(w.message) for w in caught)
    assert all("not the gradient" in h.verification for h in found)


def test_influence_does_not_depend_on_earlier_calls():
    problem, pieces = problem_of(), [classes() for _ in range(2)]
    used = br.Implicit()
    br.hypergradient(problem, pieces[0], pieces[0], used)
    assert problem.state(used.curvature).memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ways = (used, br.Implicit(), br.Implicit(curvature=br.Hessian()))
        scores = [br.influence(problem, pieces, [pieces[0]], way).scores for way in ways]
        noted = br.influence(problem, pieces, [pieces[0]], br.Implicit(curvature=br.GaussNewton()))
    for name, expected in scores[2].items():
        assert torch.equal(scores[0][name], expected)
        assert torch.equal(scores[1][name], expected)
    assert "outputs found at cross_entropy" in noted.solves[0].detail


def test_batches_of_both_kinds_are_noted():
    torch.manual_seed(1)
    sometimes = lambda o, y: F.cross_entropy(o, y) if len(y) == 24 else by_hand(o, y)  # noqa: E731
    pieces = [(24, classes()), (20, classes(20))]
    for recompute, order in ((False, 1), (True, 1), (True, -1)):
        sizes, given = zip(*pieces[::order], strict=True)
        batches = br.Batches(given, weights=sizes, recompute=recompute)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            h = br.hypergradient(problem_of(sometimes), batches, classes(), br.Implicit())
        assert "Gauss-Newton, since" in h.solve.detail
        assert "the Hessian for a batch" in h.solve.detail
        assert h.verification == "verified"


def test_halves_never_mix_two_curvatures():
    """The solve of the second half alone meets the negative curvature, along the second weight."""
    model, hyper = (
        nn.ParameterDict({"w": torch.tensor([0.5, 0.1])}),
        nn.ParameterDict({"a": torch.tensor([-1.0, 0.5])}),
    )

    def train_loss(m, h, b):
        outputs = torch.stack([m["w"][0], m["w"][1].square() / 2])
        return F.mse_loss(outputs, b) + (h["a"].exp() * m["w"].square()).sum()

    problem = br.Problem(model, hyper, train_loss, lambda m, h, b: (b @ m["w"]).square().mean())
    train, rows = torch.tensor([1.0, 9.0]), torch.eye(2).repeat(3, 1)
    methods = br.Implicit(), br.Implicit()
    for method, half, meets in zip(methods, (rows[0::2], rows[1::2]), (False, True), strict=True):
        br.hypergradient(problem, train, half, method)
        assert bool(problem.state(method.curvature).memory) is meets
    found = br.hypergradient(problem, train, rows, br.Halves(br.Implicit()))
    expected = br.hypergradient(problem, train, rows, br.Halves(br.Implicit(curvature=br.GaussNewton())))
    assert torch.equal(totals(found), totals(expected))
    assert found.solve.products > expected.solve.products
    assert "Gauss-Newton, since" in found.solve.detail


def test_an_argument_that_is_detached_in_place_is_an_error_of_the_library():
    def detaching(m, h, b):
        outputs = m(b[0])
        loss = F.cross_entropy(outputs, b[1])
        outputs.detach_()
        return loss + h(m)

    problem, batch = problem_of(), classes()
    problem.train_loss = detaching
    with pytest.raises(br.Error, match="detach"):
        br.hypergradient(problem, batch, batch, br.Implicit(curvature=br.GaussNewton()))
