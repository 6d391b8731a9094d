"""Influence of training examples: against hypergradients of the whole set, and against trainings without an example."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
from weighted_regression import CLASSES, EXACT, PARTS, Data, N, penalty, val_loss


@pytest.fixture(scope="module")
def data():
    torch.set_default_dtype(torch.float64)
    return Data()


def test_it_is_the_hypergradient_of_the_whole_set(data):
    found = br.influence(data.problem, data.batches, data.queries, EXACT)
    assert found.examples == N
    torch.testing.assert_close(found.losses, data.losses())
    for scores, query in zip(found.scores["table"], data.queries, strict=True):
        h = br.hypergradient(data.problem, data.whole, query, EXACT)
        torch.testing.assert_close(scores, h.total["table"].to_dense(), rtol=1e-8, atol=1e-12)


def test_trainings_without_an_example():
    """−score predicts what the loss becomes without an example, up to the second order in 1/N."""
    data = Data()
    before = data.losses()
    scores = br.influence(data.problem, data.batches, data.queries, EXACT).scores["table"]
    changes = []
    for i in range(N):
        data.weights.table.data[i] = 0.0
        data.train()
        changes.append(data.losses() - before)
        data.weights.table.data[i] = 1.0
    actual = torch.stack(changes, dim=1)
    for mine, theirs in zip(-scores, actual, strict=True):
        assert float(torch.corrcoef(torch.stack([mine, theirs]))[0, 1]) > 0.9
        assert float((mine - theirs).norm() / theirs.norm()) < 0.5


def test_the_derivative_of_a_new_training():
    data = Data()
    scores = br.influence(data.problem, data.batches, data.queries, EXACT).scores["table"]
    found = []
    for weight in (1.0 + 1e-5, 1.0 - 1e-5):
        data.weights.table.data[7] = weight
        data.train()
        found.append(data.losses())
    torch.testing.assert_close(scores[:, 7], (found[0] - found[1]) / 2e-5, rtol=1e-5, atol=1e-9)


STEPS = {"max_steps": 100, "tolerance": 1e-10}


@pytest.mark.parametrize(
    "method",
    [
        br.Implicit(br.ConjugateGradient(**STEPS)),
        br.Implicit(br.ConjugateGradient(**STEPS, recycle=10)),
        br.Implicit(br.ConjugateGradient(**STEPS), br.GaussNewton(*PARTS)),
        br.Implicit(br.ConjugateGradient(**STEPS, preconditioner=br.KFAC(*PARTS))),
        br.Implicit(br.Nystrom(rank=15, damping=0.0)),
        br.Implicit(br.Nystrom(rank=15, damping=0.0, reuse=1)),
        br.Implicit(br.Exact(), br.FiniteDifference()),
    ],
    ids=[
        "conjugate gradient",
        "recycled",
        "Gauss-Newton",
        "KFAC",
        "Nystrom",
        "shared Nystrom",
        "differences",
    ],
)
def test_methods_agree(data, method):
    expected = br.influence(data.problem, data.batches, data.queries, EXACT).scores["table"]
    found = br.influence(data.problem, data.batches, data.queries, method)
    torch.testing.assert_close(found.scores["table"], expected, rtol=1e-4, atol=1e-6)
    assert len(found.solves) == 2


def test_recycled_pairs_make_later_queries_cheaper(data):
    queries = [data.queries[1]] * 3
    method = br.Implicit(br.ConjugateGradient(100, tolerance=1e-8, recycle=20))
    products = [s.products for s in br.influence(data.problem, data.batches, queries, method).solves]
    assert products[2] < products[0]


def test_queries_share_a_nystrom_approximation(data):
    method = br.Implicit(br.Nystrom(rank=15, damping=0.0, reuse=10))
    found = br.influence(data.problem, data.batches, [data.queries[1]] * 3, method)
    assert [solve.products for solve in found.solves] == [16, 1, 1]
    torch.testing.assert_close(found.scores["table"][2], found.scores["table"][0])


def test_a_part_of_the_data_for_the_curvature(data):
    part = data.batches[1]
    found = br.influence(data.problem, data.batches, data.queries[:1], EXACT, solve_on=part)
    h = br.hypergradient(data.problem, part, data.queries[0], EXACT)
    rows = part[0]
    expected = h.total["table"].to_dense()[rows] * len(rows) / N
    torch.testing.assert_close(found.scores["table"][0][rows], expected, rtol=1e-8, atol=1e-12)
    assert bool((found.scores["table"][0] != 0.0).all())


def test_other_hyperparameters(data):
    """Classes and a decay: scores have the shape of each hyperparameter, with a direct part if there is one."""
    hyper = nn.ParameterDict({"classes": torch.ones(CLASSES), "decay": torch.tensor(-4.0)})

    def loss(model, hyper, batch):
        each = F.cross_entropy(model(batch[1]), batch[2], reduction="none")
        decay = hyper["decay"].exp() * sum(w.square().sum() for w in model.parameters())
        return (hyper["classes"][batch[2]] * each).mean() + decay

    def val(model, hyper, batch):
        return val_loss(model, hyper, batch) + 0.1 * hyper["decay"]

    problem = br.Problem(data.model, hyper, loss, val)
    found = br.influence(problem, data.batches, data.queries, EXACT)
    for q, query in enumerate(data.queries):
        h = br.hypergradient(problem, data.whole, query, EXACT)
        for name in hyper:
            torch.testing.assert_close(found.scores[name][q], h.total[name], rtol=1e-8, atol=1e-12)
    with pytest.raises(br.Error, match="a ranking needs one table"):
        found.helpful(1)


def test_two_traps(data):
    """A hypergradient for each batch, and batches of unequal sizes without them: both are far off."""
    right = br.influence(data.problem, data.batches, data.queries, EXACT).scores["table"]
    sizes = [len(batch[0]) for batch in data.batches]
    with pytest.warns(br.BestResponseWarning, match="equal weights to batches of 4 to 16 examples"):
        equal = br.Batches(data.batches)

    def scores(batch, query):
        return br.hypergradient(data.problem, batch, query, EXACT).total["table"].to_dense()

    for query, expected in zip(data.queries, right, strict=True):
        each = sum(n / N * scores(batch, query) for n, batch in zip(sizes, data.batches, strict=True))
        for wrong in (each, scores(equal, query)):
            assert float((wrong - expected).norm() / expected.norm()) > 0.05
        torch.testing.assert_close(scores(br.Batches(data.batches, sizes), query), expected)


def test_a_size_needs_batches_with_sizes(data):
    part, every = data.batches[1:2], br.Batches(data.batches, [4, 16, 10])
    with pytest.warns(br.BestResponseWarning, match="14 of the 30 entries"):
        expected = br.influence(data.problem, part, data.queries, EXACT, solve_on=every, size=N).scores[
            "table"
        ]
    with pytest.warns(br.BestResponseWarning, match="14 of the 30 entries"):
        found = br.influence(
            data.problem, br.Batches(part, [16]), data.queries, EXACT, solve_on=every, size=N
        ).scores["table"]
    torch.testing.assert_close(found, expected)
    with pytest.raises(br.Error, match="size needs Batches"):
        br.influence(data.problem, br.Batches(part), data.queries, EXACT, size=N)


def test_rankings(data):
    found = br.influence(data.problem, data.batches, data.queries, EXACT)
    scores = found.scores["table"]
    assert torch.equal(found.helpful(3), scores.argsort(dim=1)[:, :3])
    assert torch.equal(found.harmful(3), scores.argsort(dim=1, descending=True)[:, :3])
    assert found.helpful(1000).shape == (2, N)


def test_it_verifies_and_leaves_no_trace(verifying):
    data = Data()
    before = {n: x.clone() for n, x in data.problem.live().items()}
    data.model.train()
    found = br.influence(data.problem, data.batches, data.queries, EXACT)
    assert found.verification == "verified"
    assert data.model.training
    assert all(torch.equal(x, before[n]) and x.grad is None for n, x in data.problem.live().items())


def test_failed_solves_warn_in_each_call(data):
    method = br.Implicit(br.Neumann(terms=50, scale=1e3))
    for _ in range(2):
        with pytest.warns(br.BestResponseWarning, match="1 of 1 solves of influence failed"):
            br.influence(data.problem, data.batches, data.queries[:1], method)


def test_a_part_of_the_examples_and_the_size_of_all(data):
    """The scores of some batches are those of the same rows among all; a warning names what was not scored."""
    every = br.Batches(data.batches, [len(batch[0]) for batch in data.batches])
    expected = br.influence(data.problem, data.batches, data.queries, EXACT).scores["table"]
    with pytest.warns(
        br.BestResponseWarning, match="14 of the 30 entries of 'table' are in no training batch"
    ):
        found = br.influence(
            data.problem, data.batches[1:2], data.queries, EXACT, solve_on=every, size=N
        ).scores["table"]
    rows = data.batches[1][0]
    torch.testing.assert_close(found[:, rows], expected[:, rows], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("used", ["detached", "not at all"])
def test_a_table_that_does_not_reach_the_training_loss(data, used):
    def loss(model, weights, batch):
        each = F.cross_entropy(model(batch[1]), batch[2], reduction="none")
        return ((weights(batch[0]).detach() if used == "detached" else 1.0) * each).mean() + penalty(model)

    problem = br.Problem(data.model, data.weights, loss, val_loss)
    with pytest.raises(br.Error, match=r"\['table'\] reach neither"):
        br.influence(problem, data.batches, data.queries, EXACT)


def test_a_table_that_does_not_move_the_weights(data):
    def loss(model, weights, batch):
        return F.cross_entropy(model(batch[1]), batch[2]) + penalty(model) + weights(batch[0]).sum()

    problem = br.Problem(data.model, data.weights, loss, val_loss)
    with pytest.warns(br.BestResponseWarning, match="reach train_loss, but not its gradient"):
        found = br.influence(problem, data.batches, data.queries, EXACT)
    assert not found.scores["table"].any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda d: (None, d.batches, d.queries), "takes a Problem over one copy"),
        (lambda d: (d.problem, d.batches, d.queries, br.Unrolled(3, 0.1)), r"takes a method Implicit\("),
        (lambda d: (d.problem, d.whole, d.queries), "train_batches must be a list of batches"),
        (lambda d: (d.problem, d.batches, d.queries[0]), "queries must be a list of batches"),
        (lambda d: (d.problem, iter(d.batches), d.queries), "iterable more than once"),
        (lambda d: (d.problem, d.batches, []), "at least one validation batch"),
        (lambda d: (d.problem, [], d.queries), "at least one batch"),
        (
            lambda d: (d.problem, [object()], d.queries),
            "counts each training batch by its number of examples",
        ),
    ],
)
def test_arguments(data, arguments, message):
    with pytest.raises(br.Error, match=message):
        br.influence(*arguments(data))
