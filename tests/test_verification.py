"""Derivatives that are wrong are refused or warned of with their cause, and right ones are passed without a word."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bestresponse as br
from bestresponse.diagnostics.measuring import peak_bytes
from bestresponse.testing import check_method
from bestresponse.verification import twin

pytestmark = pytest.mark.usefixtures("verifying")


def fit(model, hyper, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def problem_of(model, loss=fit, initial=0.1, **keywords):
    decay = br.hyperparameters.WeightDecay(model, initial=initial, per="tensor")
    return br.Problem(model, decay, lambda m, h, b: loss(m, h, b) + h(m), loss, **keywords)


def batch(n=24, inputs=3):
    return torch.randn(n, inputs), torch.randn(n, 2)


def around(layer, kink=nn.Tanh):
    return nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 8), kink(), nn.Linear(8, 2))


def gauss_newton(problem):
    return br.GaussNewton(lambda m, h, b: m(b[0]), lambda o, b: F.mse_loss(o, b[1]), problem.hyper)


class Calling(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class WithoutGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            return g * (1 - x.tanh() ** 2)


class SavesAnIntermediate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        z = x.tanh()
        ctx.z = z.detach()
        return z

    @staticmethod
    def backward(ctx, g):
        return g * (1 - ctx.z**2)


class ThroughNumpy(torch.autograd.Function):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def forward(x):
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(g.detach().numpy() * (1 - np.tanh(x.detach().numpy()) ** 2))


class Recomputed(torch.autograd.Function):
    """A checkpoint made at home."""

    @staticmethod
    def forward(ctx, f, x, *parameters):
        ctx.f = f
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return f(x)

    @staticmethod
    def backward(ctx, g):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.f(z), [z, *parameters], g)


class Twice(torch.autograd.Function):
    """As it should be."""

    @staticmethod
    def forward(ctx, x):
        z = x.tanh()
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        return g * (1 - z**2)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -0.5 * g


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return Recomputed.apply(self.f, x, *self.f.parameters())


class Equilibrium(nn.Module):
    """A fixed point whose gradient is solved for in a hook."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.normal_(self.linear.weight, std=0.2)

    def step(self, z, x):
        return torch.tanh(self.linear(z) + x)

    def forward(self, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(40):
                z = self.step(z, x)
        z = self.step(z, x)
        start = z.detach().requires_grad_()
        again = self.step(start, x.detach())

        def solve(g):
            y = g
            for _ in range(40):
                y = torch.autograd.grad(again, start, y, retain_graph=True)[0] + g
            return y

        if z.requires_grad:
            z.register_hook(solve)
        return z


class SparseValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.randn(6))
        self.places = torch.tensor([[0, 1, 2, 3, 0, 2], [0, 1, 2, 3, 1, 3]])

    def forward(self, x):
        matrix = torch.sparse_coo_tensor(self.places, self.values, (4, 4), check_invariants=True)
        return torch.tanh(torch.sparse.mm(matrix, x.T).T)


LOST = {
    "no_grad": (lambda: Calling(WithoutGraph.apply), r"WithoutGraph \(test_verification.py, line \d+\)"),
    "saved intermediate": (lambda: Calling(SavesAnIntermediate.apply), "SavesAnIntermediate .*saved"),
    "numpy": (lambda: Calling(ThroughNumpy.apply), "ThroughNumpy"),
    "home-made checkpoint": (Block, "Recomputed"),
    "equilibrium": (Equilibrium, r"register_hook\(\) in test_verification.py, line \d+"),
    "sparse values": (SparseValues, "SparseCoo.*values of a sparse tensor"),
}


@pytest.mark.parametrize(("dtype", "kink"), [(torch.float64, nn.Tanh), (torch.float32, nn.ReLU)])
@pytest.mark.parametrize("case", LOST)
def test_a_lost_path_is_refused_by_name(case, dtype, kink):
    torch.set_default_dtype(dtype)
    layer, cause = LOST[case]
    problem, b = problem_of(around(layer(), kink)), batch()
    for _ in range(2):  # a refusal is not forgotten
        with pytest.raises(br.errors.SecondDerivativeError, match=cause):
            br.hypergradient(problem, b, b, br.Implicit(br.Neumann(1, scale=0.1)))


@pytest.mark.parametrize("case", ["no_grad", "equilibrium", "sparse values"])
def test_other_methods_refuse_it_too(case):
    layer, cause = LOST[case]
    problem, b = problem_of(around(layer())), batch()
    curvature = gauss_newton(problem)
    for method in (br.Implicit(br.Neumann(1, scale=0.1), curvature), br.Unrolled(3, 0.1), br.Forward(2, 0.1)):
        with pytest.raises(br.errors.SecondDerivativeError, match=cause):
            br.hypergradient(problem, b, b, method)


def test_a_lost_path_to_hyperparameters_is_refused():
    hyper = nn.ParameterDict({"scale": nn.Parameter(torch.ones(4))})
    problem = br.Problem(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        hyper,
        lambda m, h, b: F.mse_loss(m[2](WithoutGraph.apply(m[0](b[0]) * h["scale"])), b[1]),
        fit,
    )
    b = batch()
    with pytest.raises(br.errors.SecondDerivativeError, match="WithoutGraph"):
        br.hypergradient(problem, b, b, br.Implicit(br.Identity()))


def test_a_path_that_the_method_does_not_use_is_not_refused():
    problem, b = problem_of(around(Calling(SavesAnIntermediate.apply))), batch()
    for method in (br.Implicit(br.Identity()), br.Implicit(curvature=gauss_newton(problem))):
        assert br.hypergradient(problem, b, b, method).verification == "verified"


def straight_through(x):
    return x + ((4 * x).round() / 4 - x).detach()


def weighted_by_detached(model, hyper, b):
    losses = (model(b[0]) - b[1]).square().mean(1)
    return (losses.detach().sigmoid() * losses).mean()


FIELDS = {
    "reversal": (lambda: around(Calling(Reversal.apply)), fit, r"Reversal \(test_verification.py"),
    "reversal by detach": (
        lambda: around(Calling(lambda x: 1.5 * x.detach() - 0.5 * x)),
        fit,
        r"detach\(\) in",
    ),
    "straight through": (lambda: around(Calling(straight_through)), fit, r"detach\(\) in test_verification"),
    "through data": (lambda: around(Calling(lambda x: x * x.data)), fit, r"\.data in test_verification"),
    "detached weights": (lambda: around(nn.Tanh()), weighted_by_detached, r"detach\(\) in test_verification"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", FIELDS)
def test_a_training_gradient_of_no_loss_is_warned_of(case, dtype):
    torch.set_default_dtype(dtype)
    model, loss, cause = FIELDS[case]
    b = batch()
    problem = problem_of(model(), loss)
    method = br.Implicit(br.Neumann(1, scale=0.1))
    with pytest.warns(br.BestResponseWarning, match=f"not the gradient of train_loss.*{cause}.*GMRES"):
        h = br.hypergradient(problem, b, b, method)
    assert "not verified: the training gradient" in h.verification
    br.hypergradient(problem, b, b, method)  # warned of once
    silent = problem_of(problem.model, loss, verify=False)
    assert br.hypergradient(silent, b, b, method).verification is None


class Potential(torch.autograd.Function):
    """A "loss" whose gradient is S w, which is that of no loss where S is not symmetric."""

    @staticmethod
    def forward(ctx, w, S):
        ctx.save_for_backward(w, S)
        return 0.5 * w @ S @ w

    @staticmethod
    def backward(ctx, g):
        w, S = ctx.saved_tensors
        return g * (S @ w), None


def test_gmres_is_right_where_the_curvature_is_not_symmetric():
    S, b = torch.eye(3) + torch.tensor([[0.0, 1.0, 0], [-1.0, 0, 0.5], [0, 0, 0]]), torch.randn(3)
    problem = br.Problem(
        nn.ParameterDict({"w": nn.Parameter(torch.randn(3))}),
        nn.ParameterDict({"c": nn.Parameter(torch.zeros(3))}),
        lambda m, h, _: Potential.apply(m["w"], S) - h["c"] @ m["w"],
        lambda m, h, _: b @ m["w"],
    )
    with pytest.warns(br.BestResponseWarning, match="Potential.*GMRES remains right"):
        h = br.hypergradient(problem, 0, 0, br.Implicit(br.solvers.GMRES(5)))
    torch.testing.assert_close(h.total["c"], torch.linalg.solve(S.T, b))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(6, 3, padding_idx=0), nn.Linear(3, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.table((x.abs() * 5).long().clamp(0, 5))).mean(1))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.out = nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.3), nn.GELU()), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(checkpoint(self.inside, x, use_reentrant=False))


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inside(x).to(x.dtype)


def zeroed():
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    for w in model.parameters():
        nn.init.zeros_(w)
    return model


def pixels():
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(3, 2),
    )  # fmt: skip


RIGHT = {
    "tanh": (lambda: around(nn.Tanh()), 3),
    "ReLU": (lambda: around(nn.ReLU(), nn.ReLU), 3),
    "zero weights": (zeroed, 3),
    "dropout": (lambda: around(nn.Dropout(0.4), nn.ReLU), 3),
    "batch norm": (lambda: around(nn.BatchNorm1d(4), nn.ReLU), 3),
    "layer norm": (lambda: around(nn.LayerNorm(4), nn.SiLU), 3),
    "convolution, pooling": (pixels, 16),
    "embedding": (Words, 3),
    "checkpoint": (Checkpointed, 3),
    "autocast": (Autocast, 3),
    "own function": (lambda: around(Calling(Twice.apply), nn.ReLU), 3),
    "shifted by a detached maximum": (
        lambda: around(Calling(lambda x: (x - x.amax(1, True).detach()).softmax(1))),
        3,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", RIGHT)
def test_right_derivatives_are_verified_without_a_word(case, dtype):
    torch.set_default_dtype(dtype)
    make, inputs = RIGHT[case]
    problem, b = problem_of(make()), batch(24, inputs)
    methods = [br.Implicit(br.Neumann(1, scale=0.01)), br.Implicit(br.Identity(), gauss_newton(problem))]
    methods += [br.Penalty(1, 0.01), br.Direct()]
    if case != "checkpoint":
        methods.append(br.Unrolled(2, 0.01))
    for method in methods:
        assert br.hypergradient(problem, b, b, method).verification == "verified"


def test_masks_that_are_others_in_float64_are_no_reason_to_leave_the_copy_out():
    torch.set_default_dtype(torch.float32)
    drop = br.hyperparameters.ConcreteDropout(initial=0.5)
    model, b = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), drop, nn.Linear(8, 2)), batch()
    for seed in range(4):
        h = br.hypergradient(br.Problem(model, drop, fit, fit), b, b, br.Implicit(), seed)
        assert h.verification == "verified"


@pytest.mark.parametrize("kind", ["KFAC", "EmpiricalFisher"])
def test_other_curvatures_are_verified(kind):
    problem, b = problem_of(around(nn.Tanh())), batch()
    curvature = {
        "KFAC": br.KFAC(lambda m, h, b: m(b[0]), lambda o, b: F.mse_loss(o, b[1]), problem.hyper),
        "EmpiricalFisher": br.EmpiricalFisher(
            lambda m, h, b: (m(b[0]) - b[1]).square().mean(1), problem.hyper
        ),
    }[kind]
    h = br.hypergradient(problem, b, b, br.Implicit(br.Neumann(1, scale=0.01), curvature))
    assert h.verification == "verified"


def test_a_curvature_that_is_not_symmetric_is_warned_of():
    class Skewed(br.GaussNewton):
        def linearise(self, passes, batch):
            system = super().linearise(passes, batch)
            outer = system.outer
            system.outer = lambda v: {
                n: x + torch.arange(x.numel()).view(x.shape) * v[n].flip(0) for n, x in outer(v).items()
            }
            return system

    problem, b = problem_of(around(nn.Tanh())), batch()
    inner = gauss_newton(problem)
    method = br.Implicit(br.Neumann(0, scale=0.01), Skewed(inner.predict, inner.loss, inner.rest))
    with pytest.warns(br.BestResponseWarning, match="not symmetric"):
        br.hypergradient(problem, b, b, method)


def test_differences_are_not_verified_by_differences():
    problem, b = problem_of(around(nn.Tanh())), batch()
    h = br.hypergradient(problem, b, b, br.Implicit(br.Identity(), br.FiniteDifference()))
    assert h.verification == "not verified: differences replace second derivatives"


@pytest.mark.filterwarnings("ignore:spectral_norm at")
def test_what_differences_cannot_show_is_said():
    b = batch()
    model = around(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    h = br.hypergradient(problem_of(model), b, b, br.Implicit(br.Neumann(1, scale=0.1)))
    assert h.verification.startswith("not verified: spectral_norm")
    words = Words()
    words.table.max_norm = 1.0
    h = br.hypergradient(problem_of(words), b, b, br.Implicit(br.Identity()))
    assert h.verification.startswith("not verified: embeddings with max_norm")


def test_kinks_in_float32_are_not_verified_where_there_is_no_copy():
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    problem = problem_of(model, lambda m, h, b: fit(model, h, b))  # a copy would use the original
    b = batch(200)
    h = br.hypergradient(problem, b, b, br.Implicit(br.Neumann(1, scale=0.01)))
    assert h.verification == "not verified: kinks in float32"
    assert "kinks in float32" in repr(h)
    lossy = around(Calling(WithoutGraph.apply), nn.ReLU)
    problem = problem_of(lossy, lambda m, h, b: fit(lossy, h, b))
    with pytest.raises(br.errors.SecondDerivativeError, match="WithoutGraph"):  # the function by itself
        br.hypergradient(problem, b, b, br.Implicit(br.Neumann(1, scale=0.01)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_costs_few_passes_and_only_once(dtype):
    torch.set_default_dtype(dtype)
    calls = []

    def counted(m, h, b):
        calls.append(len(b[0]))
        return fit(m, h, b)

    problem = problem_of(around(nn.Tanh()), counted)
    b = batch(160)
    counts = []
    for method in (*(br.Implicit(curvature=br.Hessian()) for _ in range(2)), br.Implicit(br.Exact())):
        calls.clear()
        br.hypergradient(problem, b, b, method)
        counts.append(list(calls))
    passes = 2 if dtype == torch.float64 else 3
    assert counts == [[160, 160, *[20] * passes], [160, 160], [160, 160]]


def test_it_changes_nothing_and_leaves_no_trace():
    model = around(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.3)), nn.ReLU)
    b = batch()
    method = br.Implicit(br.Neumann(3, scale=0.1))
    check_method(method, problem_of(model), b, b)
    with_it, without = (
        br.hypergradient(problem_of(model, verify=v), b, b, method, seed=1).total for v in (True, False)
    )
    assert all(torch.equal(x, without[n]) for n, x in with_it.items())


def test_verify_must_be_true_or_false():
    with pytest.raises(br.Error, match=r"Problem\.verify must be True or False"):
        problem_of(nn.Linear(3, 2), verify="no")


def test_the_outcome_is_printed(capsys):
    problem, b = problem_of(nn.Linear(3, 2)), batch()
    br.hypergradient(problem, b, b, br.Implicit(br.Exact())).summary()
    assert "Derivatives: verified" in capsys.readouterr().out


# --- batches, copies and fields ----------------------------------------------------------------------------


class Rows(nn.Module):
    """A lossy function on the examples whose first entry is positive."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x):
        z = self.first(x)
        return self.last(torch.where(x[:, :1] > 0, WithoutGraph.apply(z), z.sin()))


def test_a_lossy_function_on_the_last_examples_is_found():
    x, y = torch.randn(128, 3), torch.randn(128, 2)
    order = x[:, 0].argsort()
    problem, whole = problem_of(Rows()), (x[order], y[order])
    with pytest.raises(br.Error, match="WithoutGraph"):
        br.hypergradient(problem, whole, whole, br.Implicit(br.Exact(1e-3)))
    halves = [(x[order[:64]], y[order[:64]]), (x[order[64:]], y[order[64:]])]
    for recompute in (False, True):
        pieces = br.Batches(halves, recompute=recompute)
        with pytest.raises(br.Error, match="WithoutGraph"):
            br.hypergradient(problem_of(Rows()), pieces, whole, br.Implicit(br.Exact(1e-3)))


def test_batches_that_are_recomputed_are_verified_with_the_memory_of_one():
    model = nn.Sequential(nn.Linear(1, 4096), *[nn.Tanh()] * 8, nn.Linear(4096, 1))
    pieces = [(torch.randn(8, 1), torch.randn(8, 1)) for _ in range(8)]

    def peak(train):
        problem = problem_of(model)
        used = peak_bytes(lambda: br.hypergradient(problem, train, pieces[0], br.Implicit(br.Neumann(1))))
        assert next(iter(problem.verifications(br.Hessian).values())) == "verified"
        return used

    one = peak(pieces[0])
    assert peak(br.Batches(pieces, recompute=True)) < 1.3 * one
    assert peak(br.Batches(pieces)) > 3.0 * one


def copied(problem, b):
    return twin._precise(twin.Trial(problem, b, b, None, None, False), twin._ROOM)


class Frozen(nn.Module):
    """A frozen table in half precision below a network; with a step, each pass adds it to the table."""

    def __init__(self, step=0.0):
        super().__init__()
        self.table = nn.Embedding(500, 64, dtype=torch.bfloat16).requires_grad_(False)
        self.head, self.step = nn.Sequential(nn.Linear(64, 3), nn.Tanh(), nn.Linear(3, 5)), step

    def forward(self, words):
        if self.step:
            self.table.weight.data.add_(self.step)
        return self.head(self.table(words).to(self.head[0].weight.dtype))


def words_of(rows, length):
    return torch.randint(500, (rows, length))


def predicted(model, hyper, words):
    return F.cross_entropy(model(words).flatten(0, 1), words.flatten() % 5)


def test_frozen_weights_are_held_once_in_float64(monkeypatch):
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(twin, "_ROOM", 0)
    words, size = words_of(2, 16), 500 * 64
    problem = problem_of(Frozen(), predicted)
    assert peak_bytes(lambda: copied(problem, words)) < 12 * size  # the copy has 8 for each entry


@pytest.mark.parametrize("step", [0.0, 1e-3])
def test_a_table_that_a_pass_edits_is_restored_in_the_copy(step):
    torch.set_default_dtype(torch.float32)
    problem, words = problem_of(Frozen(step), predicted), words_of(2, 16)
    before = problem.model.table.weight.clone()
    with problem.edits.whole({}):
        assert (copied(problem, words).problem.edits.room is None) == bool(step)
    h = br.hypergradient(problem, words, words, br.Implicit())
    assert h.verification == "verified"
    assert torch.equal(before, problem.model.table.weight)


def test_large_frozen_weights_are_not_copied(monkeypatch):
    torch.set_default_dtype(torch.float32)
    problem, words = problem_of(Frozen(), predicted), words_of(2, 16)
    assert copied(problem, words) is not None
    monkeypatch.setattr(twin, "LARGEST_IN_ALL", 30_000)
    monkeypatch.setattr(twin, "twin", lambda *_: pytest.fail("a copy was made"))
    assert copied(problem, words) is None


def test_what_only_a_backward_pass_or_other_weights_change_is_restored_in_the_copy(monkeypatch):
    """A frozen tensor that no forward pass changes does not drift in the copy, and nothing is said of it."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(twin, "_ROOM", -1)

    class Moving(nn.Module):
        def __init__(self, lossy):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
            self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
            self.lossy = lossy

        def forward(self, x):
            z = self.net(x)
            if z.requires_grad and self.lossy:
                z.register_hook(lambda g: g.detach())
            y = z.tanh() * self.scale.clone()
            if y.requires_grad:
                y.register_hook(lambda g: (self.scale.data.mul_(0.99), None)[1])
            return y

    b = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        h = br.hypergradient(problem_of(Moving(False)), b, b, br.Implicit(br.Neumann(1, scale=0.01)))
    assert h.verification == "verified"
    with pytest.raises(br.errors.SecondDerivativeError):
        br.hypergradient(problem_of(Moving(True)), b, b, br.Implicit(br.Neumann(1, scale=0.01)))


def test_two_sequences_are_not_enough_for_a_contrastive_loss():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.inner, self.outer = nn.Embedding(100, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, words):
            return F.normalize(self.outer(WithoutGraph.apply(self.inner(self.words(words).mean(1)))), dim=1)

    def contrastive(model, hyper, words):
        a, b = model(words).chunk(2)
        return F.cross_entropy(a @ b.T / 0.5, torch.arange(len(a)))

    words = torch.randint(100, (16, 256))
    with pytest.raises(br.errors.SecondDerivativeError, match="WithoutGraph"):
        br.hypergradient(problem_of(Encoder(), contrastive), words, words, br.Implicit())


def test_a_copy_is_compared_without_the_tensors_of_its_graph():
    """A copy in float64 whose losses compute in float32 is refused, and costs no more than the loss itself."""
    torch.set_default_dtype(torch.float32)
    layer = Calling(lambda x: x.float().tanh().to(x.dtype))
    model = nn.Sequential(nn.Linear(8, 16), *[layer] * 20, nn.Linear(16, 1))
    problem, b = problem_of(model), (torch.randn(4096, 8), torch.randn(4096, 1))
    size = 4096 * 16 * 4
    assert peak_bytes(lambda: copied(problem, b)) < 12 * size
    assert copied(problem, b) is None
    with problem.undisturbed(None) as passes:
        assert peak_bytes(lambda: passes.train_loss(b)) > 18 * size


def test_a_loss_with_a_gradient_inside_is_verified_on_a_copy():
    torch.set_default_dtype(torch.float32)

    def penalised(model, hyper, b):
        x = b[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return fit(model, hyper, b) + slope.square().mean()

    problem, b = problem_of(around(nn.Tanh()), penalised), batch()
    assert copied(problem, b) is not None
    assert br.hypergradient(problem, b, b, br.Implicit()).verification == "verified"


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [br.GaussNewton, br.KFAC, br.EmpiricalFisher])
def test_curvatures_of_the_outputs_are_verified_on_several_batches(kind, recompute):
    def curvature(problem):
        if kind is br.EmpiricalFisher:
            return kind(lambda m, h, b: (m(b[0]) - b[1]).square().mean(1), problem.hyper)
        return kind(lambda m, h, b: m(b[0]), lambda o, b: F.mse_loss(o, b[1]), problem.hyper)

    several = br.Batches([batch(20), batch(12)], weights=[20, 12], recompute=recompute)
    problem = problem_of(around(nn.Tanh()))
    method = br.Implicit(br.Exact(0.1), curvature(problem))
    assert br.hypergradient(problem, several, batch(), method).verification == "verified"
    if kind is br.KFAC:
        return  # its factors need first derivatives alone
    problem = problem_of(around(Calling(WithoutGraph.apply)))
    with pytest.raises(br.errors.SecondDerivativeError, match="WithoutGraph"):
        br.hypergradient(problem, several, batch(), br.Implicit(br.Exact(0.1), curvature(problem)))


class Pairs(dict):
    def __init__(self, x, y):
        super().__init__(x=x, y=y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["mapping", "sparse", "nested", "words"])
def test_batches_of_any_kind_are_verified(kind, dtype):
    torch.set_default_dtype(dtype)
    x, y = torch.randn(32, 3), torch.randn(32, 2)
    make = {
        "mapping": (Pairs(x, y), lambda b: (b["x"], b["y"])),
        "sparse": ((torch.eye(32).to_sparse(), x, y), lambda b: (torch.sparse.mm(b[0], b[1]), b[2])),
        "nested": (
            (torch.nested.nested_tensor(list(x.split(8)), layout=torch.jagged), y),
            lambda b: (b[0].values(), b[1]),
        ),
        "words": (([str(i) for i in range(32)], x, y), lambda b: b[1:]),
    }
    data, unpacked = make[kind]
    loss = lambda m, h, b: fit(m, h, unpacked(b))  # noqa: E731
    problem = problem_of(nn.Linear(3, 2), loss)
    assert br.hypergradient(problem, data, data, br.Implicit()).verification == "verified"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_hook_on_a_parameter_is_not_lost_in_a_copy(dtype):
    torch.set_default_dtype(dtype)
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].weight.register_hook(lambda g: 0.5 * g)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            told = br.hypergradient(problem_of(model), batch(64), batch(64), br.Implicit(br.Exact(0.1)))
        except br.Error:
            return
    assert told.verification != "verified" or caught


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", [br.Unrolled(3, 0.1), br.Forward(3, 0.1), br.Implicit()], ids=repr)
@pytest.mark.parametrize("kink", [nn.Tanh, nn.ReLU])
def test_a_loss_that_computes_partly_in_float32_is_not_called_wrong(method, kink, dtype):
    torch.set_default_dtype(dtype)
    x, y = torch.randn(64, 3), torch.randint(2, (64,))
    loss = lambda m, h, b: F.cross_entropy(m(b[0]).float(), b[1])  # noqa: E731
    for _ in range(3):
        model = nn.Sequential(nn.Linear(3, 16), kink(), nn.Linear(16, 2))
        problem = problem_of(model, loss, initial=1e-4)
        br.hypergradient(problem, (x, y), (x, y), method)  # warnings are errors


@pytest.mark.parametrize(
    "method",
    [br.Implicit(br.Identity()), br.Implicit(), br.Implicit(curvature=br.Hessian())],
    ids=["identity", "Gauss-Newton", "Hessian"],
)
def test_a_detached_network_that_weighs_examples_is_not_refused(method):
    """Its training gradient is not the gradient of a loss; the mixed term is the derivative of that field."""
    for _ in range(4):
        hyper = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1), nn.Sigmoid())
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        data = torch.randn(64, 3), torch.randint(2, (64,))

        def train_loss(m, h, b):
            losses = F.cross_entropy(m(b[0]), b[1], reduction="none")
            return (h(losses[:, None].detach())[:, 0] * losses).mean()

        problem = br.Problem(model, hyper, train_loss, lambda m, h, b: F.cross_entropy(m(b[0]), b[1]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            h = br.hypergradient(problem, data, data, method)
        told = any("not the gradient of train_loss" in str(w.message) for w in caught)
        assert told if isinstance(method.solver, br.ConjugateGradient) else h.verification == "verified"


def test_a_loss_whose_passes_differ_is_named():
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def loss(m, h, b):
        kept = (torch.rand(b[0].shape, generator=generator) < 0.5).to(b[0].dtype)
        return F.mse_loss(m(b[0] * kept), b[1])

    with pytest.warns(br.BestResponseWarning, match="the same in two passes"):
        br.hypergradient(problem_of(model, loss), batch(), batch(), br.Implicit())


def test_a_graph_of_the_callers_outlives_verification():
    problem, b = problem_of(around(nn.Linear(4, 4))), batch()
    loss = problem.train_loss(problem.model, problem.hyper, b)
    assert br.hypergradient(problem, b, b, br.Implicit()).verification == "verified"
    loss.backward()


def test_a_refusal_leaves_nothing_to_start_from():
    problem, method = problem_of(around(Calling(WithoutGraph.apply))), br.Implicit()
    with pytest.raises(br.Error, match="WithoutGraph"):
        br.hypergradient(problem, batch(), batch(), method)
    assert problem.state(method).solution is None
