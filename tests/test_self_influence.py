"""The influence of each example on its own loss: against the dense answer, and against trainings without it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
from bestresponse.hyperparameters import Weights
from bestresponse.influence import self_influence
from conftest import SEED
from weighted_regression import CLASSES, EXACT, PARTS, Data, N, predict, weighted_losses


@pytest.fixture(scope="module")
def data():
    torch.set_default_dtype(torch.float64)
    return Data(verify=False)


def network(decay):
    """A small network with a weight for each of 8 examples, away from a minimum."""
    torch.manual_seed(SEED)
    model, weights = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)), Weights(8, "clamp")

    def train_loss(model, hyper, batch):
        whole = sum(w.square().sum() for w in model.parameters())
        return weighted_losses(predict(model, hyper, batch), batch) + decay * whole

    def own_loss(model, hyper, batch):
        return F.cross_entropy(model(batch[1]), batch[2])

    x, y = torch.randn(8, 3), torch.randint(CLASSES, (8,))
    batches = [tuple(part[rows] for part in (torch.arange(8), x, y)) for rows in torch.arange(8).split(3)]
    return br.Problem(model, weights, train_loss, own_loss, verify=False), batches, (torch.arange(8), x, y)


def dense(problem, whole):
    """The Hessian of the training loss, and the gradient of each example's own loss as a row."""
    live = problem.weights
    sizes = [w.numel() for w in live.values()]

    def functional(loss, batch):
        def of(flat):
            pieces = zip(live.items(), flat.split(sizes), strict=True)
            placed = {n: piece.view(w.shape) for (n, w), piece in pieces}
            return torch.func.functional_call(
                Call(problem, loss), {f"model.{n}": x for n, x in placed.items()}, (batch,)
            )

        return of

    flat = torch.cat([w.detach().flatten() for w in live.values()])
    hessian = torch.autograd.functional.hessian(functional(problem.train_loss, whole), flat)
    rows = [
        torch.autograd.functional.jacobian(functional(problem.val_loss, [x[i : i + 1] for x in whole]), flat)
        for i in range(len(whole[0]))
    ]
    return hessian, torch.stack(rows)


class Call(nn.Module):
    def __init__(self, problem, loss):
        super().__init__()
        self.model, self.hyper, self.loss = problem.model, problem.hyper, loss

    def forward(self, batch):
        return self.loss(self.model, self.hyper, batch)


@pytest.mark.parametrize(
    ("decay", "damping", "iterative"),
    [(0.5, 0.0, False), (0.5, 0.3, True), (0.0, 0.7, False)],
    ids=["definite", "damped", "indefinite and damped"],
)
def test_it_is_the_dense_answer(decay, damping, iterative):
    problem, batches, whole = network(decay)
    solver = br.ConjugateGradient(60, tolerance=1e-12, damping=damping) if iterative else br.Exact(damping)
    found = self_influence(problem, batches, br.Implicit(solver))
    A, g = dense(problem, whole)
    inverse = torch.linalg.inv(A + damping * torch.eye(len(A)))
    expected = -torch.einsum("ni,ij,nj->n", g, inverse, g) / 8
    torch.testing.assert_close(found.scores, expected, rtol=1e-9, atol=1e-13)
    assert (found.examples, found.failed) == (8, 0)
    assert found.residual < 1e-11
    assert iterative or found.products == len(A)  # one matrix for all examples
    assert torch.equal(found.largest(3), expected.argsort()[:3])


def test_a_singular_curvature_gives_the_least_squares_answer():
    """Softmax without a penalty: a constant on all logits has no curvature, and no gradient either."""
    data = Data(verify=False)
    for w in data.model.parameters():
        w.data.mul_(0.3)

    def loss(model, hyper, batch):
        return weighted_losses(predict(model, hyper, batch), batch)

    def own(model, hyper, batch):
        return F.cross_entropy(model(batch[1]), batch[2])

    problem = br.Problem(data.model, data.weights, loss, own, verify=False)
    with pytest.warns(br.BestResponseWarning, match="rank 10 of 15") as met:
        found = self_influence(problem, data.batches)
    assert len(met) == 1
    A, g = dense(problem, data.whole)
    expected = -torch.einsum("ni,ij,nj->n", g, torch.linalg.pinv(A, hermitian=True, rtol=1e-10), g) / N
    torch.testing.assert_close(found.scores, expected, rtol=1e-7, atol=1e-12)


def test_it_is_the_influence_of_each_example_as_a_query(data):
    i, x, y = data.whole
    queries = [(x[k : k + 1], y[k : k + 1]) for k in range(N)]
    expected = br.influence(data.problem, data.batches, queries, EXACT).scores["table"].diagonal()
    torch.testing.assert_close(
        self_influence(data.problem, data.batches).scores, expected, rtol=1e-9, atol=1e-14
    )
    shuffled = torch.randperm(N, generator=torch.Generator().manual_seed(1)).split([1, 20, 9])
    batches = [(i[rows], x[rows], y[rows]) for rows in shuffled]
    found = self_influence(data.problem, br.Batches(batches, [1, 20, 9]))
    torch.testing.assert_close(found.scores, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("form", ["list", "Batches"])
def test_a_part_of_the_examples(data, form):
    every = br.Batches(data.batches, [len(batch[0]) for batch in data.batches])
    expected, rows = self_influence(data.problem, data.batches).scores, data.batches[1][0]
    part = data.batches[1:2] if form == "list" else br.Batches(data.batches[1:2], [16])
    with pytest.warns(
        br.BestResponseWarning, match="14 of the 30 entries of 'table' are in no training batch"
    ):
        found = self_influence(data.problem, part, solve_on=every, size=N)
    torch.testing.assert_close(found.scores[rows], expected[rows], rtol=1e-9, atol=1e-14)
    assert found.examples == 16


def test_trainings_without_an_example():
    """−score predicts what the example's own loss becomes without it, up to the second order in 1/N."""
    data = Data(verify=False)
    _, x, y = data.whole
    scores, actual = self_influence(data.problem, data.batches).scores[::3], []
    start = {n: w.clone() for n, w in data.model.state_dict().items()}

    def own_loss(i):
        with torch.no_grad():
            return float(F.cross_entropy(data.model(x[i : i + 1]), y[i : i + 1]))

    for i in range(0, N, 3):
        before = own_loss(i)
        data.weights.table.data[i] = 0.0
        data.train()
        actual.append(own_loss(i) - before)
        data.weights.table.data[i] = 1.0
        data.model.load_state_dict(start)
    actual = torch.tensor(actual)
    assert bool((scores < 0).all())
    assert bool((actual > 0).all())
    assert float(torch.corrcoef(torch.stack([-scores, actual]))[0, 1]) > 0.9
    assert float((-scores - actual).norm() / actual.norm()) < 0.5


def test_least_squares_without_an_example_in_closed_form():
    """A score −r²h has the leverage h, from which the residual without the example follows: r / (1 − h)."""
    generator = torch.Generator().manual_seed(SEED)
    x, y = torch.randn(12, 3, generator=generator), torch.randn(12, 1, generator=generator)
    A = x.T @ x / 12 + 0.2 * torch.eye(3)
    model = nn.Linear(3, 1, bias=False)
    model.weight.data = torch.linalg.solve(A, x.T @ y / 12).T

    def loss(model, hyper, batch):
        index, x, y = batch
        return (hyper(index) * (model(x) - y)[:, 0].square()).mean() / 2 + 0.1 * model.weight.square().sum()

    problem = br.Problem(model, Weights(12, "clamp"), loss, loss, verify=False)
    scores = self_influence(problem, [(torch.arange(12), x, y)]).scores
    r = (y - model(x)).detach()[:, 0]
    h = -scores / r.square()
    for i in range(12):
        kept = torch.arange(12) != i
        A_without = x[kept].T @ x[kept] / 12 + 0.2 * torch.eye(3)
        w = torch.linalg.solve(A_without, x[kept].T @ y[kept] / 12)
        torch.testing.assert_close(r[i] / (1 - h[i]), (y[i] - x[i] @ w)[0], rtol=1e-9, atol=1e-12)


class Decay:
    """0.1 ‖w‖², which knows its curvature."""

    def __call__(self, model, *_):
        return 0.1 * sum(w.square().sum() for w in model.parameters())

    forward = __call__

    def curvature_diagonal(self, model):
        return {n: torch.full_like(w, 0.2) for n, w in model.named_parameters()}


def squares(outputs, batch):
    return (outputs[1] * (outputs[0] - batch[2]).square().sum(1)).mean()


def test_the_inverse_of_kronecker_factors_needs_no_product():
    """For one linear layer under squared error the factors are the Hessian, and their inverse is exact."""
    torch.manual_seed(SEED)
    model, rest = nn.Linear(3, 2), Decay()
    whole = torch.arange(10), torch.randn(10, 3), torch.randn(10, 2)
    batches = [tuple(part[rows] for part in whole) for rows in torch.arange(10).split(6)]

    def loss(model, hyper, batch):
        return squares(predict(model, hyper, batch), batch) + rest(model)

    problem = br.Problem(model, Weights(10, "clamp"), loss, loss, verify=False)
    exact = self_influence(problem, batches)
    solver = br.solvers.Inverse(br.KFAC(predict, squares, rest, steady=0))
    found = self_influence(problem, batches, br.Implicit(solver))
    torch.testing.assert_close(found.scores, exact.scores, rtol=1e-6, atol=1e-9)
    assert (found.products, found.residual) == (0, None)


def test_other_curvatures_and_other_tables(data):
    expected = self_influence(data.problem, data.batches).scores
    for curvature in (br.GaussNewton(*PARTS), br.FiniteDifference()):
        found = self_influence(data.problem, data.batches, br.Implicit(br.Exact(), curvature))
        torch.testing.assert_close(found.scores, expected, rtol=1e-5, atol=1e-8)
    table = nn.ParameterDict({"rows": torch.ones(N, 1)})  # dense gradients

    def loss(model, hyper, batch):
        return data.problem.train_loss(model, lambda index: hyper["rows"][index, 0], batch)

    found = self_influence(br.Problem(data.model, table, loss, loss, verify=False), data.batches)
    torch.testing.assert_close(found.scores[:, 0], expected, rtol=1e-9, atol=1e-14)


def test_it_verifies_and_leaves_no_trace(verifying):
    data = Data()
    data.problem.val_loss = lambda *_: 1 / 0  # not used
    before = {n: x.clone() for n, x in data.problem.live().items()}
    assert self_influence(data.problem, data.batches).verification == "verified"
    assert all(torch.equal(x, before[n]) and x.grad is None for n, x in data.problem.live().items())


def test_failed_solves_warn_in_each_call(data):
    method = br.Implicit(br.Neumann(terms=50, scale=1e3))
    for _ in range(2):
        with pytest.warns(br.BestResponseWarning, match="30 of 30 solves of influence failed"):
            assert self_influence(data.problem, data.batches, method).failed == 30


def test_arguments(data):
    i, x, y = data.whole
    with pytest.raises(br.Error, match="self_influence takes a Problem"):
        self_influence(None, data.batches)
    with pytest.raises(br.Error, match=r"self_influence takes a method Implicit\("):
        self_influence(data.problem, data.batches, br.Direct())
    with pytest.raises(br.Error, match=r"self_influence.train_batches must be a list of batches"):
        self_influence(data.problem, data.whole)
    with pytest.raises(br.Error, match="at least one batch"):
        self_influence(data.problem, [])
    with pytest.raises(br.Error, match="got entry 3 in two batches"):
        self_influence(data.problem, [(i, x, y), (i[3:5], x[3:5], y[3:5])])
    with pytest.raises(br.Error, match="size needs Batches"):
        self_influence(data.problem, br.Batches([data.whole]), size=100)
    two = nn.ParameterDict({"a": torch.ones(N), "b": torch.ones(())})
    problem = br.Problem(data.model, two, lambda m, h, b: h["a"].sum() * h["b"] * m(b[1]).sum(), PARTS[2])
    with pytest.raises(br.Error, match="one table of weights of examples"):
        self_influence(problem, data.batches)

    def unweighted(model, hyper, batch):
        return F.cross_entropy(model(batch[1]), batch[2]) + hyper(batch[0]).sum()

    problem = br.Problem(data.model, data.weights, unweighted, unweighted)
    with pytest.raises(br.Error, match="train_loss must weigh the losses of examples by 'table'"):
        self_influence(problem, data.batches)
