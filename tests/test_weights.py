"""Tables of weights: sparse gradients equal dense ones, steps move the rows of the batch only."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import bestresponse as br
from bestresponse.hyperparameters import ExampleWeights, Indexed, LossWeights, Shrinkage, Weights
from conftest import SEED

ROWS = 40


def batch(number, size=20):
    g = torch.Generator().manual_seed(SEED + number)
    draw = {"generator": g}
    return (
        torch.randint(ROWS, (size,), **draw),
        torch.randn(size, 4, **draw),
        torch.randint(3, (size,), **draw),
    )


def train_loss(model, hyper, batch):
    index, x, y = batch
    penalty = 0.02 * sum(w.square().sum() for w in model.parameters())
    return (hyper(index) * F.cross_entropy(model(x), y, reduction="none")).mean() + penalty


def val_loss(model, hyper, batch):
    return F.cross_entropy(model(batch[1]), batch[2])


def problem_of(hyper):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return br.Problem(model, hyper, train_loss, val_loss)


METHODS = {
    "exact": lambda: br.Implicit(br.Exact(damping=1.0)),
    "default": lambda: br.Implicit(),
    "differences": lambda: br.Implicit(br.Neumann(3, scale=0.1), br.FiniteDifference()),
    "unrolled": lambda: br.Unrolled(5, 0.1, checkpoint_every=2),
    "penalty": lambda: br.Penalty(5, 0.1),
    "SAMA": lambda: br.SAMA(br.rules.SGD()),
    "halves": lambda: br.Halves(br.Implicit(br.Exact(damping=1.0))),
}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_sparse_hypergradient_is_the_dense_one(method, several):
    train = br.Batches([batch(1), batch(2)]) if several else batch(1)
    found = []
    for sparse in (True, False):
        problem = problem_of(Weights(ROWS, sparse=sparse))
        with torch.no_grad():
            problem.hyper.table.copy_(torch.linspace(-1.0, 1.0, ROWS))
        found.append(br.hypergradient(problem, train, batch(3), METHODS[method]()))
    rows, dense = found
    assert rows.total["table"].layout == torch.sparse_coo
    assert dense.total["table"].layout == torch.strided
    used = train.batches if several else [train]
    seen = torch.cat([index for index, _, _ in used]).unique()
    assert torch.equal(rows.total["table"].coalesce().indices()[0], seen)
    for part in ("total", "direct", "indirect"):
        same = getattr(rows, part)["table"].to_dense(), getattr(dense, part)["table"]
        torch.testing.assert_close(*same, rtol=1e-6, atol=1e-9)
    assert rows.norm == pytest.approx(dense.norm, rel=1e-6)
    assert rows.norm > 0.0
    if method == "halves":
        assert rows.agreement == pytest.approx(dense.agreement, abs=1e-9)


def test_sparse_hypergradient_is_verified(verifying):
    h = br.hypergradient(problem_of(Weights(ROWS)), batch(1), batch(2), br.Implicit())
    assert h.verification == "verified"


def test_an_index_that_occurs_twice():
    """The derivative of a weight that two examples share is the sum of both."""
    _, x, y = batch(1, size=4)
    one = br.hypergradient(
        problem_of(Weights(4, "clamp")), (torch.arange(4), x, y), batch(3), br.Implicit(br.Exact())
    )
    two = br.hypergradient(
        problem_of(Weights(2, "clamp")), (torch.tensor([0, 1, 1, 0]), x, y), batch(3), br.Implicit(br.Exact())
    )
    rows = one.total["table"].to_dense()
    expected = torch.stack([rows[0] + rows[3], rows[1] + rows[2]])
    torch.testing.assert_close(two.total["table"].to_dense(), expected, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("shrinkage", [None, 0.2])
def test_steps_move_the_rows_of_the_batch_only(shrinkage):
    hyper = Weights(ROWS, "clamp", shrinkage=shrinkage)
    problem = problem_of(hyper)
    weights = torch.optim.Adam(problem.weights.values(), 1e-2)
    rates = torch.optim.SparseAdam(list(hyper.parameters()), 0.5)
    tuner = br.Tuner(problem, weights, rates, br.Implicit())
    train = [batch(1, size=8), batch(2, size=8)]
    tuner.fit(train, [batch(3)], 4)
    drawn = torch.cat([index for index, _, _ in train]).unique()
    others = torch.ones(ROWS, dtype=torch.bool)
    others[drawn] = False
    assert bool((hyper.table[others] == 1.0).all())
    assert bool((hyper.table != 1.0).any())
    assert bool((hyper.table >= 0.0).all())


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda p: torch.optim.Adam(p, 0.1), "got Adam"),
        (lambda p: torch.optim.RMSprop(p, 0.1), "got RMSprop"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "got SGD with momentum"),
        (lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1), "got SGD with weight_decay"),
    ],
)
def test_optimisers_that_move_other_rows_are_refused(make, got):
    problem = problem_of(Weights(ROWS, "clamp"))
    weights = torch.optim.SGD(problem.weights.values(), 0.1)
    with pytest.raises(br.Error, match=got):
        br.Tuner(problem, weights, make(list(problem.hyperparameters.values())))
    dense = problem_of(Weights(ROWS, "clamp", sparse=False))
    br.Tuner(dense, torch.optim.SGD(dense.weights.values(), 0.1), make(list(dense.hyperparameters.values())))


def test_cross_validation_of_a_table():
    """Its optimiser takes sparse gradients too."""
    hyper = Weights(ROWS)
    problem = problem_of(hyper)
    data = batch(
        1 - SEED
    )  # always the same: of other data, the start may be the best of two steps, which is kept
    found = br.cross_validate(problem.model, hyper, train_loss, val_loss, data, 2, hyper_steps=2)
    assert len(found.history) == 2
    assert bool((hyper.table != Weights(ROWS).table).any())


def test_shrinkage_goes_to_the_initial_weight():
    free, drawn = Weights(3, initial=2.0), Weights(3, initial=2.0, shrinkage=0.5)
    for hyper in (free, drawn):
        with torch.no_grad():
            hyper.table += torch.tensor([1.0, -1.0, 2.0])
        hyper.table.grad = torch.sparse_coo_tensor([[0, 2]], [1.0, 1.0], (3,), check_invariants=True)
        hyper.shrink_()
    start = Weights(3, initial=2.0).table
    expected = free.table.detach().clone()
    expected[[0, 2]] = (expected[[0, 2]] + start[[0, 2]]) / 2
    torch.testing.assert_close(drawn.table.detach(), expected)
    assert Weights(3, shrinkage=Shrinkage(0.1)).shrinkage.towards is None


@pytest.mark.parametrize("positive", ["clamp", "softplus", "sigmoid", "softmax"])
def test_values(positive):
    hyper = Weights(5, positive)
    first = 0.5 if positive == "sigmoid" else 1.0
    index = torch.tensor([[0, 4], [2, 2]])
    torch.testing.assert_close(hyper(index).detach(), torch.full((2, 2), first))
    with torch.no_grad():
        hyper.table.uniform_(0.1, 1.0)
    torch.testing.assert_close(hyper(index), hyper.values()[index])
    assert bool((hyper.values() > 0.0).all())
    if positive == "softmax":
        assert float(hyper.values().detach().mean()) == pytest.approx(1.0)
    (slope,) = torch.autograd.grad(hyper(index).sum(), hyper.table)
    assert slope.is_sparse == (positive != "softmax")
    dense = Weights(5, positive, sparse=False)
    dense.load_state_dict(hyper.state_dict())
    torch.testing.assert_close(slope.to_dense(), torch.autograd.grad(dense(index).sum(), dense.table)[0])


def test_softplus_of_a_large_weight():
    assert float(Weights(2, initial=100.0).values()[0].detach()) == pytest.approx(100.0)


def test_groups_share_a_weight():
    hyper = Weights(2, per=torch.tensor([0, 1, 1, 0, 1]))
    with torch.no_grad():
        hyper.table.copy_(torch.tensor([0.3, 2.0]))
    index = torch.arange(5)
    torch.testing.assert_close(hyper(index), hyper.values()[torch.tensor([0, 1, 1, 0, 1])])
    assert "per" in hyper.state_dict()


def test_mean_one():
    hyper = Weights(6, mean_one=True)
    with torch.no_grad():
        hyper.table.uniform_(-1.0, 1.0)
    assert float(hyper(torch.tensor([1, 5, 3])).detach().mean()) == pytest.approx(1.0)


def test_indexed_data_set():
    data = [(torch.tensor(float(i)), {"label": i}) for i in range(6)]
    indexed = Indexed(data)
    assert indexed[-1][0] == 5
    index, (x, more) = next(iter(DataLoader(indexed, batch_size=4)))
    assert index.tolist() == x.tolist() == more["label"].tolist() == [0, 1, 2, 3]


def cleared(hyper):
    hyper.table.data.zero_()
    return hyper


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: Weights(0), "Weights.n must be"),
        (lambda: Weights(3, "relu"), 'must be "clamp", "softplus", "sigmoid" or "softmax"'),
        (lambda: Weights(3, initial=0.0), "Weights.initial must be above 0"),
        (lambda: Weights(3, "sigmoid", initial=1.5), "between 0 and 1"),
        (lambda: Weights(3, "softmax", initial=2.0), "must be 1 or None"),
        (lambda: Weights(3, shrinkage=1.5), "Weights.shrinkage"),
        (lambda: Weights(3, per=[0, 1]), "Weights.per must be a vector of integers"),
        (lambda: Weights(3, per=torch.tensor([0, 3])), "groups from 0 to n − 1 = 2"),
        (lambda: Weights(3)(torch.tensor([0, 3])), "indices from 0 to 2; got 3"),
        (lambda: Weights(3)(torch.tensor([0.0])), "a tensor of integers"),
        (lambda: Weights(3, dtype=torch.int64), "a floating-point dtype"),
        (lambda: cleared(Weights(3, "clamp", mean_one=True))(torch.arange(3)), "must not all be zero"),
        (lambda: Indexed(iter([1])), "must have __getitem__ and __len__"),
        (lambda: ExampleWeights(1000), r"For a weight for each index, use Weights\(n\)"),
        (lambda: LossWeights(1000), "must be a module that maps losses"),
        (lambda: LossWeights(nn.Linear(1, 2))(torch.rand(3)), "a score for each of 48 losses"),
    ],
)
def test_arguments(run, message):
    with pytest.raises(br.Error, match=message):
        run()


def meta_weight_net():
    """The problem with a weight for each loss, and the usual detached form of the same training gradient."""
    torch.manual_seed(0)
    hyper = LossWeights(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)))
    model = nn.Linear(4, 3)

    def losses(model, batch):
        penalty = 0.02 * sum(w.square().sum() for w in model.parameters())
        return F.cross_entropy(model(batch[1]), batch[2], reduction="none"), penalty

    def integral(model, hyper, batch):
        each, penalty = losses(model, batch)
        return hyper(each).mean() + penalty

    def detached(model, hyper, batch):
        each, penalty = losses(model, batch)
        return (hyper.weights(each.detach()) * each).mean() + penalty

    return br.Problem(model, hyper, integral, val_loss), br.Problem(model, hyper, detached, val_loss)


def test_the_gradient_has_the_weight_of_each_loss():
    problem, detached = meta_weight_net()
    gradients = [
        torch.autograd.grad(p.train_loss(p.model, p.hyper, batch(1)), list(p.weights.values()))
        for p in (problem, detached)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


def test_loss_weights_are_differentiated_and_the_detached_form_warns(verifying):
    problem, detached = meta_weight_net()
    h = br.hypergradient(problem, batch(1), batch(2), br.Implicit(br.Exact()))
    assert h.verification == "verified"
    with pytest.warns(br.BestResponseWarning, match="not the gradient of train_loss"):
        br.hypergradient(detached, batch(1), batch(2), br.Implicit(br.Exact()))


def test_loss_weights_against_a_new_training():
    """The hypergradient is the derivative of the validation loss of weights that are trained again."""
    problem, _ = meta_weight_net()
    weights, name = problem.weights, "network.2.weight"
    p = problem.hyperparameters[name]

    def trained():
        for w in weights.values():
            w.detach().zero_()
        descent = torch.optim.LBFGS(
            weights.values(), max_iter=300, tolerance_grad=1e-12, tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure():
            descent.zero_grad()
            loss = problem.train_loss(problem.model, problem.hyper, batch(1))
            torch.autograd.backward(loss, inputs=list(weights.values()))
            return loss

        descent.step(closure)
        descent.zero_grad()
        live = list(weights.values())
        for _ in range(3):  # Newton's steps, since descent ends some way before the minimum
            slopes = torch.autograd.grad(
                problem.train_loss(problem.model, problem.hyper, batch(1)), live, create_graph=True
            )
            slope = torch.cat([x.flatten() for x in slopes])
            rows = [torch.autograd.grad(x, live, retain_graph=True) for x in slope]
            curvature = torch.stack([torch.cat([x.flatten() for x in row]) for row in rows])
            step = torch.linalg.solve(curvature, slope.detach())
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(live).detach() - step, live)
        return float(val_loss(problem.model, problem.hyper, batch(2)).detach())

    values = []
    for shift in (1e-4, -2e-4):
        with torch.no_grad():
            p[0, 3] += shift
        values.append(trained())
    with torch.no_grad():
        p[0, 3] += 1e-4
    trained()
    h = br.hypergradient(problem, batch(1), batch(2), br.Implicit(br.Exact()))
    assert float(h.total[name][0, 3]) == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-3, abs=1e-9)
