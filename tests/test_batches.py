import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
import cases
from bestresponse import _tree

pytestmark = pytest.mark.filterwarnings("ignore:Batches gives equal weights")


def pieces(batch, sizes):
    return list(zip(*(torch.split(x, sizes) for x in batch), strict=True))


def predict(model, decay, batch):
    return model(batch[0])


def output_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


CURVATURES = {
    "hessian": lambda decay: br.Hessian(),
    "gauss-newton": lambda decay: br.GaussNewton(predict, output_loss, rest=decay),
    "rest by difference": lambda decay: br.GaussNewton(predict, output_loss),
    "differences": lambda decay: br.FiniteDifference(),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_micro_batches_equal_the_one_large_batch(curvature, recompute):
    problem, train, val = cases.network()
    method = br.Implicit(br.ConjugateGradient(6, damping=0.5), CURVATURES[curvature](problem.hyper))
    whole = br.hypergradient(problem, train, val, method)
    several = br.Batches(pieces(train, [3, 2, 7]), weights=[3, 2, 7], recompute=recompute)
    parts = br.hypergradient(problem, several, br.Batches(pieces(val, [4, 6]), weights=[4, 6]), method)
    tolerance = 1e-7 if curvature == "differences" else 1e-12
    for name, x in whole.total.items():
        assert torch.allclose(parts.total[name], x, rtol=tolerance, atol=tolerance * float(x.abs().max()))
    assert abs(parts.val_loss - whole.val_loss) < 1e-14
    assert parts.solve.products == whole.solve.products


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_the_mixed_term_weighs_the_batches(curvature, recompute):
    """A hyperparameter that acts on the examples, so that each batch has a mixed term of its own."""
    model, hyper = nn.Linear(3, 2), nn.ParameterDict({"heat": torch.tensor(0.3)})

    def heated(model, hyper, batch):
        return hyper["heat"].exp() * model(batch[0])

    def train_loss(model, hyper, batch):
        return output_loss(heated(model, hyper, batch), batch)

    problem = br.Problem(model, hyper, train_loss, lambda m, h, b: F.cross_entropy(m(b[0]), b[1]))
    train, val = ((torch.randn(n, 3), torch.randint(2, (n,))) for n in (12, 10))
    chosen = {
        "hessian": br.Hessian(),
        "gauss-newton": br.GaussNewton(heated, output_loss, rest=lambda m, h, b: 0.0 * m.weight.sum()),
        "rest by difference": br.GaussNewton(heated, output_loss),
        "differences": br.FiniteDifference(),
    }[curvature]
    method = br.Implicit(br.Identity(), chosen)
    whole = br.hypergradient(problem, train, val, method).indirect["heat"]
    several = br.Batches(pieces(train, [3, 2, 7]), weights=[3, 2, 7], recompute=recompute)
    parts = br.hypergradient(problem, several, val, method).indirect["heat"]
    alike = br.Batches(pieces(train, [3, 2, 7]), recompute=recompute)
    assert float(parts) == pytest.approx(float(whole), rel=1e-7)
    assert float(br.hypergradient(problem, alike, val, method).indirect["heat"]) != pytest.approx(
        float(whole), rel=1e-2
    )


@pytest.mark.parametrize("method", [br.Unrolled(3, 0.1), br.Direct()])
def test_other_methods_take_several_batches(method):
    case = cases.ridge()
    whole = br.hypergradient(case.problem, case.train, case.val, method)
    train = br.Batches(pieces(case.train, [10, 10]))
    parts = br.hypergradient(case.problem, train, br.Batches(pieces(case.val, [5, 5, 5])), method)
    for name, x in whole.total.items():
        assert torch.allclose(parts.total[name], x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_part_of_the_weights_may_be_reached_by_a_part_of_the_batches(recompute):
    model = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    hyper = br.hyperparameters.WeightDecay(model, initial=0.1)

    def train_loss(model, hyper, batch):
        which, x = batch
        decays = dict(hyper.named_parameters())
        decay = sum(
            (decays[f"log_decay.{which}.{n}"].exp() * w.square()).sum() / 2
            for n, w in model[which].named_parameters()
        )
        return (model[which](x) - 1).square().mean() + decay

    def val_loss(model, hyper, x):
        return (model["a"](x) + model["b"](x)).square().mean()

    problem = br.Problem(model, hyper, train_loss, val_loss)
    batches = [("a", torch.randn(5, 2)), ("b", torch.randn(5, 2))]

    def whole(model, hyper, batch):
        return sum(train_loss(model, hyper, b) for b in batches) / 2

    joint = br.Problem(model, hyper, whole, val_loss)
    val = torch.randn(4, 2)
    h = br.hypergradient(joint, None, val, br.Implicit(br.Exact()))
    parts = br.hypergradient(problem, br.Batches(batches, recompute=recompute), val, br.Implicit(br.Exact()))
    for name, x in h.total.items():
        assert float(x.abs().max()) > 0
        assert torch.allclose(parts.total[name], x, rtol=1e-10)


def test_each_batch_has_dropout_masks_of_its_own_and_every_pass_the_same():
    problem, (x, y), val = cases.network(nn.Dropout(0.5))
    seen = []

    def train_loss(model, decay, batch):
        hidden = model[1](torch.ones(6))
        seen.append(hidden.detach().clone())
        return F.cross_entropy(model(batch[0]), batch[1]) + decay(model)

    problem = br.Problem(problem.model, problem.hyper, train_loss, problem.val_loss)
    state = torch.get_rng_state()
    batches = br.Batches([(x[:6], y[:6])] * 3, recompute=True)
    method = br.Implicit(br.ConjugateGradient(2, damping=1.0))
    br.hypergradient(problem, batches, val, method)
    assert torch.equal(state, torch.get_rng_state())
    assert len(seen) > 6
    # The last batch of a product is the first of the next one, whose graph is still there.
    for other, number in zip(seen, [0, 1, 2, 1, 0, 1, 2, 1, 0], strict=False):
        assert torch.equal(seen[number], other)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    first = seen[0].clone()
    seen.clear()
    br.hypergradient(problem, (x[:6], y[:6]), val, method)
    assert torch.equal(seen[0], first)  # the first of several is drawn as the only one


def test_fresh_batches_take_the_batches_in_turn():
    problem, (x, y), val = cases.network()
    seen = []

    def train_loss(model, decay, batch):
        seen.append(batch[0].shape[0])
        return F.cross_entropy(model(batch[0]), batch[1]) + decay(model)

    problem = br.Problem(problem.model, problem.hyper, train_loss, problem.val_loss)
    solver = br.Neumann(5, scale=0.1, fresh_batches=True)
    batches = br.Batches([(x[:k], y[:k]) for k in (2, 3, 4)], recompute=True)
    h = br.hypergradient(problem, batches, val, br.Implicit(solver))
    # What they reach, the series, the mixed term.
    assert seen == [*(2, 3, 4), *(2, 3, 4, 2, 3), *(2, 3, 4)]
    assert h.solve.products == 5
    assert h.solve.residual is None
    with pytest.raises(br.Error, match="needs several training batches"):
        br.hypergradient(problem, (x, y), val, br.Implicit(solver))


def test_fresh_batches_average_to_the_mean_curvature():
    """Over many draws of the order the mean of LiSSA's answers is that of the series with the mean matrix."""
    problem, train, val = cases.network()
    torch.manual_seed(1)
    plain = br.hypergradient(problem, train, val, br.Implicit(br.Neumann(4, scale=0.3)))
    total = _tree.zeros_like(plain.indirect)
    rounds = 100
    for _ in range(rounds):
        batches = br.Batches([(train[0][rows], train[1][rows]) for rows in torch.randperm(12).split(3)])
        h = br.hypergradient(problem, batches, val, br.Implicit(br.Neumann(4, scale=0.3, fresh_batches=True)))
        _tree.add_(total, h.indirect, 1 / rounds)
    error = _tree.norm(_tree.add(total, plain.indirect, -1.0)) / _tree.norm(plain.indirect)
    assert error < 0.04


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: br.Batches([]), "at least one batch"),
        (lambda: br.Batches(3), "a collection of batches"),
        (lambda: br.Batches(torch.zeros(3, 2)), "a collection of batches"),
        (lambda: br.Batches([1, 2], weights=2.0), "must be 2 numbers"),
        (lambda: br.Batches([1, None], weights=[1, None]), "must be 2 numbers"),
        (lambda: br.Batches([1, 2], weights=[1.0]), "must be 2 numbers"),
        (lambda: br.Batches([1, 2], weights=[0.0, 0.0]), "not all zero"),
        (lambda: br.Batches([1, 2], weights=[-1.0, 2.0]), "≥ 0"),
        (lambda: br.Batches([1, 2], weights=[float("nan"), 2.0]), "≥ 0"),
        (lambda: br.Batches([br.Batches([1])]), "one flat list"),
    ],
)
def test_bad_batches(make, words):
    with pytest.raises(br.Error, match=words):
        make()


def test_a_batch_of_weight_zero_is_never_run():
    problem, train, val = cases.network()
    bad = (torch.full((2, 3), float("nan")), train[1][:2])
    method = br.Implicit(br.ConjugateGradient(3, damping=0.5))
    one = br.hypergradient(problem, train, val, method)
    other = br.hypergradient(problem, br.Batches([bad, train], weights=[0, 1]), val, method)
    assert all(torch.equal(x, other.total[n]) for n, x in one.total.items())


def test_batches_are_no_collection_for_a_tuner():
    problem, train, val = cases.network()
    tuner = br.Tuner(
        problem,
        torch.optim.SGD(problem.weights.values(), 0.1),
        torch.optim.SGD(problem.hyperparameters.values(), 0.1),
    )
    with pytest.raises(br.Error, match=r"Pass \[Batches"):
        tuner.fit([train], br.Batches([val]), 1)


def test_a_tuner_accumulates_gradients_over_micro_batches():
    def run(split):
        torch.manual_seed(0)
        problem, train, val = cases.network()
        batch = br.Batches(pieces(train, [5, 7]), weights=[5, 7]) if split else train
        tuner = br.Tuner(
            problem,
            torch.optim.SGD(problem.weights.values(), 0.1),
            torch.optim.SGD(problem.hyperparameters.values(), 0.1),
            weight_steps=2,
        )
        tuner.fit([batch], [val], 3)
        return problem, tuner.history

    (one, history), (other, split_history) = run(False), run(True)
    for name, w in one.weights.items():
        assert torch.allclose(w, other.weights[name], rtol=1e-9, atol=1e-12)
    for a, b in zip(history, split_history, strict=True):
        assert abs(a["train_loss"] - b["train_loss"]) < 1e-12


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("recompute", [True, False])
def test_soba_with_fresh_batches_tends_to_the_solution_of_their_mean(recompute, steps):
    # L_T = a w²/2 − λ w with a = 1 and 3: dL_V/dλ = 1/2 for L_V = w.
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(()))})
    hyper = nn.ParameterDict({"rate": nn.Parameter(torch.ones(()))})
    problem = br.Problem(
        model,
        hyper,
        lambda m, h, a: a * m["w"].square() / 2 - h["rate"] * m["w"],
        lambda m, h, b: m["w"] * 1.0,
    )
    batches = br.Batches([torch.tensor(1.0), torch.tensor(3.0)], recompute=recompute)
    method = br.Implicit(br.solvers.SOBA(steps, 0.02, fresh_batches=True), warm_start=True)
    for _ in range(200 // steps):
        h = br.hypergradient(problem, batches, None, method)
    assert float(h.total["rate"]) == pytest.approx(0.5, rel=0.03)
    with pytest.raises(br.Error, match="SOBA"):
        br.Implicit(br.Neumann(3, 0.1, fresh_batches=True), warm_start=True)


def test_unequal_batches_without_weights_warn():
    batches = [(torch.zeros(n, 2), torch.zeros(n)) for n in (5, 3)]
    with pytest.warns(br.BestResponseWarning, match="equal weights to batches of 3 to 5 examples"):
        br.Batches(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        br.Batches(batches, weights=[1, 1])
        br.Batches([batches[0]] * 2)
