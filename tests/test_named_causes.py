"""What would be wrong or obscure is named with its cause; the right twins stay silent."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import bestresponse as br
from bestresponse.hyperparameters import WeightDecay
from bestresponse.passes.embedding import dense_embeddings

fit = lambda m, h, b: F.mse_loss(m(b[0]), b[1])  # noqa: E731
regularised = lambda m, h, b: fit(m, h, b) + h(m)  # noqa: E731
gauss_newton = br.GaussNewton(lambda m, h, b: m(b[0]), lambda o, b: F.mse_loss(o, b[1]), lambda m, h, b: h(m))
METHODS = {
    "implicit": br.Implicit(br.Exact()),
    "differences": br.Implicit(br.Exact(), br.FiniteDifference()),
    "Gauss-Newton": br.Implicit(br.Exact(), gauss_newton),
    "unrolled": br.Unrolled(2, 0.1),
    "forward": br.Forward(2, 0.1),
    "penalty": br.Penalty(2, 0.1),
    "SAMA": br.SAMA(rule=br.rules.SGD()),
}
EXACT = METHODS["implicit"]


def problem_of(model, train_loss=regularised, val_loss=fit):
    return br.Problem(model, WeightDecay(model, initial=0.3, per="tensor"), train_loss, val_loss)


def batch():
    return torch.randn(12, 3), torch.randn(12, 2)


def tuner_of(problem, **more):
    weights = torch.optim.SGD(problem.weights.values(), 0.1)
    return br.Tuner(problem, weights, torch.optim.SGD(problem.hyperparameters.values(), 0.1), **more)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("other", [AveragedModel, copy.deepcopy, lambda m: nn.Linear(3, 2)])
def test_a_validation_loss_that_reaches_no_weight(method, other):
    model = nn.Linear(3, 2)
    stand_in, b = other(model), batch()
    problem = problem_of(model, val_loss=lambda m, h, b: fit(stand_in, h, b))
    with pytest.raises(br.Error, match="val_loss must depend on a weight.*AveragedModel"):
        br.hypergradient(problem, b, b, method)
    with pytest.raises(br.Error, match="val_loss must depend on a weight"):
        br.hypergradient(problem, b, br.Batches([b, b]), EXACT)
    with pytest.raises(br.Error, match="val_loss must depend on a weight"):
        tuner_of(problem, method=method).fit([b], [b], 1)


class Unmoved(torch.autograd.Function):
    """It has no derivative with respect to what it takes, though it depends on it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_weight_that_is_reached_with_a_derivative_of_zero_is_silent(method):
    model, b = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), batch()
    averaged = AveragedModel(model)

    def last_layer(m, h, b):
        averaged.update_parameters(m)  # elsewhere, the average is welcome
        return F.mse_loss(m[2](b[0].new_ones(12, 4)), b[1])

    assert br.hypergradient(problem_of(model, val_loss=last_layer), b, b, method).norm > 0
    for nothing in (lambda m: 0.0 * m(b[0]).sum(), lambda m: Unmoved.apply(m(b[0])).sum()):
        loss = lambda m, h, b, nothing=nothing: nothing(m)  # noqa: E731
        assert br.hypergradient(problem_of(model, val_loss=loss), b, b, method).norm == 0


def test_a_validation_loss_of_hyperparameters_alone_is_for_direct():
    model, b = nn.Linear(3, 2), batch()
    problem = problem_of(model, val_loss=lambda m, h, b: sum(p.square().sum() for p in h.parameters()))
    assert br.hypergradient(problem, b, b, br.Direct()).norm > 0
    with pytest.raises(br.Error, match=r"use Direct\(\)"):
        br.hypergradient(problem, b, b, EXACT)


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x, y):
        return (self.scale * (x - y).square()).mean()


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_trainable_parameters_of_others_are_named_once(method):
    model, b, criterion = nn.Linear(3, 2), batch(), Weighed()
    split = method is METHODS["Gauss-Newton"]
    train = lambda m, h, b: criterion(m(b[0]), b[1]) + h(m)  # noqa: E731
    problem = problem_of(model, train)
    if split:
        method = br.Implicit(
            br.Exact(),
            br.GaussNewton(gauss_newton.predict, lambda o, b: criterion(o, b[1]), lambda m, h, b: h(m)),
        )
    with pytest.warns(br.BestResponseWarning, match=r"train_loss uses.*criterion\.scale \[2\]"):
        br.hypergradient(problem, b, b, method)
    br.hypergradient(problem, b, b, method)
    criterion.requires_grad_(False)
    br.hypergradient(problem_of(model, train), b, b, method)
    model.criterion = criterion.requires_grad_(True)
    with pytest.raises(br.Error, match="through the outputs") if split else nullcontext():
        br.hypergradient(problem_of(model, train), b, b, method)


def test_models_that_are_sharded_after_the_problem_are_refused():
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    mesh = pytest.importorskip("torch.distributed.device_mesh")
    model, b = nn.Sequential(nn.Linear(3, 2)), batch()
    method = br.Implicit(br.ConjugateGradient(20))
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        problem = problem_of(model)
        expected = br.hypergradient(problem, b, b, method).norm
        fsdp.fully_shard(model, mesh=mesh.init_device_mesh("cpu", (1,)))
        with pytest.raises(br.Error, match="fully_shard must come before Problem"):
            br.hypergradient(problem, b, b, method)
        again = br.Problem(model, problem.hyper, regularised, fit)
        assert br.hypergradient(again, b, b, method).norm == pytest.approx(expected)
        with pytest.raises(br.Error, match="needs whole weights"):
            br.hypergradient(again, b, b, EXACT)
    finally:
        dist.destroy_process_group()


def compiled(function):
    return torch.compile(function, backend="aot_eager")


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inside = nn.Linear(3, 3), compiled(Smooth())

    def forward(self, x):
        return self.inside(self.first(x))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch.compile's own
def test_compiled_parts_are_named_where_a_second_derivative_is_asked_for():
    b, part = batch(), compiled(lambda o, y: (o.tanh() - y).square().mean())
    beside = lambda m, h, b: part(m(b[0]), b[1]) + h(m)  # noqa: E731
    for name in ("implicit", "Gauss-Newton", "differences", "penalty", "unrolled"):
        problems = [problem_of(nn.Linear(3, 2), beside), problem_of(Nested())]
        for problem in problems:
            method = METHODS[name]
            if name == "Gauss-Newton":
                method = br.Implicit(
                    br.Exact(), br.GaussNewton(lambda m, h, b: m(b[0]), lambda o, b: part(o, b[1]))
                )
            if name in ("differences", "penalty"):  # these ask for gradients alone
                assert br.hypergradient(problem, b, b, method).norm > 0
                continue
            with pytest.raises(br.Error, match=r"torch\.compile.*FiniteDifference"):
                br.hypergradient(problem, b, b, method)
    # In the validation loss it is right.
    after = lambda m, h, b: part(m(b[0]), b[1])  # noqa: E731
    plain = lambda m, h, b: (m(b[0]).tanh() - b[1]).square().mean()  # noqa: E731
    linear = nn.Linear(3, 2)
    one, other = (br.hypergradient(problem_of(linear, val_loss=v), b, b, EXACT) for v in (after, plain))
    assert all(torch.allclose(one.total[n], x) for n, x in other.total.items())


class Words(nn.Module):
    def __init__(self, table, weighted=False):
        super().__init__()
        self.table, self.last, self.weighted = table, nn.Linear(3, 2), weighted
        with torch.no_grad():
            table.weight.copy_(torch.linspace(-1, 1, 30).sin().view(10, 3))
            self.last.weight.copy_(torch.linspace(1, -1, 6).view(2, 3))
            self.last.bias.zero_()

    def forward(self, words):
        offsets = torch.arange(12) * 4
        if isinstance(self.table, nn.Embedding):
            rows = self.table(words).mean(1)
        elif self.weighted:
            rows = self.table(words.view(-1), offsets, torch.linspace(0, 1, 48))
        else:
            rows = self.table(words)
        return self.last(torch.tanh(rows))


def words():
    return torch.arange(48).view(12, 4) * 7 % 10, torch.linspace(-1, 1, 24).view(12, 2)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("bag", [None, "mean", "sum"])
def test_embeddings_with_sparse_gradients(method, bag):
    kind = nn.Embedding if bag is None else partial(nn.EmbeddingBag, mode=bag)
    models = [Words(kind(10, 3, sparse=sparse), weighted=bag == "sum") for sparse in (False, True)]
    found = [br.hypergradient(problem_of(m), words(), words(), method).total for m in models]
    assert all(torch.allclose(x, found[1][n], rtol=1e-9, atol=1e-12) for n, x in found[0].items())
    assert models[1].table.sparse
    fit(models[1], None, words()).backward()
    assert models[1].table.weight.grad.is_sparse
    if bag is not None and method is EXACT:  # the form by rows is that of plain operations
        by_hand = Words(nn.Embedding(10, 3))
        factors = torch.linspace(0, 1, 48).view(12, 4, 1) if bag == "sum" else 0.25
        by_hand.forward = lambda x: by_hand.last(torch.tanh((by_hand.table(x) * factors).sum(1)))
        expected = br.hypergradient(problem_of(by_hand), words(), words(), method).total
        assert all(torch.allclose(x, found[0][n], rtol=1e-9, atol=1e-12) for n, x in expected.items())


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_run_with_sparse_weight_steps(clip):
    models = [Words(nn.Embedding(10, 3, sparse=sparse)) for sparse in (False, True)]
    rates = []
    for model in models:
        decay = WeightDecay(model, initial=0.3, per="tensor", exclude="table.*")
        problem = br.Problem(model, decay, regularised, fit)
        weights = torch.optim.SGD(problem.weights.values(), 0.1)
        tuner = br.Tuner(
            problem, weights, torch.optim.Adam(decay.parameters(), 0.1), br.Implicit(), clip_weights=clip
        )
        tuner.fit([words()], [words()], 3)
        rates.append(torch.cat([p.detach().view(-1) for p in decay.parameters()]))
    assert torch.allclose(*rates)
    model = models[1]
    adam = torch.optim.SparseAdam([model.table.weight], 0.01)
    dense = torch.optim.Adam(model.last.parameters(), 0.01)

    def step(problem, batch):
        for o in (adam, dense):
            o.zero_grad()
        regularised(problem.model, problem.hyper, batch).backward(inputs=list(problem.weights.values()))
        for o in (adam, dense):
            o.step()
            o.zero_grad()

    before = model.table.weight.detach().clone()
    br.Tuner(problem, step, torch.optim.Adam(decay.parameters(), 0.1)).fit([words()], [words()], 2)
    assert not torch.equal(before, model.table.weight)


def test_functions_with_sparse_gradients_are_named():
    class Functional(Words):
        sparse = True

        def forward(self, x):
            return self.last(torch.tanh(F.embedding(x, self.table.weight, sparse=self.sparse)).mean(1))

    model = Functional(nn.Embedding(10, 3))
    problem = problem_of(model)
    for name, method in METHODS.items():
        if name not in ("differences", "SAMA", "penalty"):
            with pytest.raises(br.Error, match="sparse=False"):
                br.hypergradient(problem, words(), words(), method)
            continue
        found = []
        for sparse in (True, False):
            model.sparse = sparse
            problem.forget(method)
            found.append(br.hypergradient(problem, words(), words(), method).total)
        model.sparse = True
        assert all(torch.allclose(x, found[1][n], rtol=1e-6) for n, x in found[0].items())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("layout", ["rows", "offsets", "offsets and the end"])
def test_bags_by_rows_are_those_of_torch(mode, padding, layout):
    bag = nn.EmbeddingBag(10, 3, mode=mode, padding_idx=padding, include_last_offset="end" in layout)
    given = torch.randint(10, (4, 5)) if layout == "rows" else torch.randint(10, (20,))
    given.view(-1)[:5] = 2
    offsets = None if layout == "rows" else torch.tensor([0, 5, 5, 9, *([20] if "end" in layout else [])])
    factors = torch.rand(given.shape) if mode == "sum" else None
    expected = bag(given, offsets, factors)
    with dense_embeddings([bag], twice=True):
        got = bag(given, offsets, factors)
        with pytest.raises((ValueError, RuntimeError)):
            bag(torch.zeros(2, 2, 2, dtype=torch.long))
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-14)
    gradients = [torch.autograd.grad(x.tanh().sum(), bag.weight)[0] for x in (expected, got)]
    assert torch.allclose(*gradients, rtol=1e-10, atol=1e-14)
    assert "forward" not in vars(bag)


class Checkpointed(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.inside, self.run = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), run

    def forward(self, x):
        return self.run(self.inside, x)


def selective(inside, x):
    policy = lambda ctx, operation, *_, **more: CheckpointPolicy.MUST_SAVE  # noqa: E731
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(inside, x, use_reentrant=False, context_fn=contexts)


class Changing:
    def __init__(self):
        self.calls = 0

    def __call__(self, inside, x):
        def run(x):
            self.calls += 1
            return inside(x if self.calls % 2 else x[:-1])

        return checkpoint(run, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (selective, "selective checkpoint.*without context_fn.*FiniteDifference"),
        (Changing(), "checkpointed part must compute the same"),
    ],
)
def test_checkpoints_that_cannot_be_differentiated_are_named(run, words):
    problem, b = problem_of(Checkpointed(run)), batch()
    with pytest.raises(br.Error, match=f"(?s){words}"):
        br.hypergradient(problem, b, b, EXACT)


def test_selective_checkpoints_serve_methods_of_first_derivatives():
    model, b = Checkpointed(selective), batch()
    for name in ("differences", "penalty", "SAMA"):
        found = []
        for run in (selective, lambda inside, x: inside(x)):
            model.run = run
            found.append(br.hypergradient(problem_of(model), b, b, METHODS[name]).total)
        assert all(torch.allclose(x, found[1][n]) for n, x in found[0].items())


def test_the_meta_device_and_complex_losses_are_named():
    model, b = nn.Linear(3, 2), batch()
    with pytest.raises(br.Error, match=r"must have values; got \['weight', 'bias'.*to_empty"):
        problem_of(nn.Linear(3, 2, device="meta"))
    for other, words in (
        (lambda x: x * (1 + 1j), "real scalar tensor; got torch.complex128"),
        (lambda x: x.to("meta"), "have a value; got a tensor on the meta device"),
    ):
        for losses, name in (
            ((lambda m, h, b: other(regularised(m, h, b)), fit), "train_loss"),  # noqa: B023
            ((regularised, lambda m, h, b: other(fit(m, h, b))), "val_loss"),  # noqa: B023
        ):
            with pytest.raises(br.Error, match=f"{name} must.*{words}"):
                br.hypergradient(problem_of(model, *losses), b, b, EXACT)


def centred(m):
    return m.weight - m.weight.detach()


@pytest.mark.parametrize(
    ("term", "words"),
    [
        (lambda m: centred(m).norm(), "second derivative of LinalgVectorNormBackward"),
        (lambda m: centred(m).norm(dim=1).sum(), "second derivative of LinalgVectorNormBackward"),
        (lambda m: centred(m).square().sum().sqrt(), "first derivative of SqrtBackward"),
        (lambda m: (centred(m).abs() ** 1.5).sum(), "second derivative of PowBackward"),
    ],
)
@pytest.mark.parametrize("method", [br.Implicit(), br.Implicit(br.Exact()), br.Implicit(br.Neumann(3, 0.1))])
def test_an_operation_with_an_infinite_second_derivative_is_named(term, words, method):
    problem, b = problem_of(nn.Linear(3, 2), lambda m, h, b: regularised(m, h, b) + term(m)), batch()
    with pytest.warns(br.BestResponseWarning, match=rf"{words}.*test_named_causes.*Damping does not repair"):
        h = br.hypergradient(problem, b, b, method)
    assert words in h.solve.detail
    smooth = problem_of(
        nn.Linear(3, 2), lambda m, h, b: regularised(m, h, b) + (centred(m).square().sum() + 1e-2).sqrt()
    )
    assert br.hypergradient(smooth, b, b, br.Implicit(br.Exact())).norm > 0


@pytest.mark.parametrize("kind", [br.GaussNewton, br.KFAC])
def test_functions_with_other_parameters_are_named(kind):
    predict, loss = (lambda m, h, b: m(b[0])), (lambda o, b: F.mse_loss(o, b[1]))
    for arguments, words in (
        ((predict, lambda o, b, h: 0.0), r"loss must be a function \(outputs, batch\).*'h'"),
        ((lambda m, b: m(b[0]), loss), r"predict must be a function \(model, hyper, batch\)"),
        ((predict, loss, lambda m, h: h(m)), r"rest must be a function \(model, hyper, batch\)"),
    ):
        with pytest.raises(br.Error, match=words) as caught:
            kind(*arguments)
        assert isinstance(caught.value, TypeError)
    kind(predict, lambda o, b, more=1: 0.0)
    kind(predict, br.losses.CrossEntropy(lambda b: b[1]), WeightDecay(nn.Linear(3, 2)))
