"""Which layers have the derivatives that each curvature asks for: right, or refused by name with a way out."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import bestresponse as br
from bestresponse import _tree
from bestresponse.methods.validation import validation_gradient
from bestresponse.passes.running_statistics import Reading
from bestresponse.solvers.direct import dense
from bestresponse.testing import differences
from bestresponse.verification.probe import gradient

N = 6


class Through(nn.Module):
    """Six numbers an example, a linear map, a layer that is in question, and another linear map."""

    def __init__(self, layer, shape, width, call=None):
        super().__init__()
        self.first, self.layer, self.last = (
            nn.Linear(3, int(torch.tensor(shape).prod())),
            layer,
            nn.Linear(width, 2),
        )
        self.shape, self.call = shape, call or (lambda layer, z: layer(z))

    def forward(self, x):
        z = torch.tanh(self.first(x)).view(len(x), *self.shape)
        return self.last(self.call(self.layer, z).reshape(len(x), -1))


class Words(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.last = table, nn.Linear(3, 2)

    def forward(self, x):
        words = (x.abs() * 10).long().clamp(0, 4)
        z = self.table(words)
        return self.last(torch.tanh(z if z.ndim == 2 else z.mean(1)))


def attention(layer, z):
    return layer(z, z, z, need_weights=False)[0]


def fused(layer, z):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return attention(layer, z)


def sampled(layer, z):
    # Within one cell of the grid: across its border the second derivative jumps.
    grid = 0.3 + 0.05 * torch.tanh(layer(z.flatten(1))).view(len(z), 2, 2, 2)
    return F.grid_sample(z, grid, align_corners=False)


def checkpointed(reentrant):
    return lambda layer, z: checkpoint(layer, z, use_reentrant=reentrant)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(3, 1))

    def forward(self, v):
        return self.g * v / v.norm(dim=1, keepdim=True)


def normed(layer):
    nn.utils.parametrize.register_parametrization(layer, "weight", Normed())
    return layer


def evaluated(model):
    return model.eval()


MODELS = {
    "attention": lambda: Through(nn.MultiheadAttention(2, 2, batch_first=True), (3, 2), 6, attention),
    "attention, fused by the user": lambda: Through(
        nn.MultiheadAttention(2, 2, batch_first=True), (3, 2), 6, fused
    ),
    "transformer layer": lambda: Through(
        nn.TransformerEncoderLayer(4, 2, 3, dropout=0.2, batch_first=True, activation="gelu"), (2, 4), 8
    ),
    "LSTM": lambda: Through(nn.LSTM(2, 2, batch_first=True), (3, 2), 6, lambda m, z: m(z)[0]),
    "GRU": lambda: Through(nn.GRU(2, 2, batch_first=True), (3, 2), 6, lambda m, z: m(z)[0]),
    "LSTM cell": lambda: Through(nn.LSTMCell(3, 2), (3,), 2, lambda m, z: m(z)[0]),
    "embedding": lambda: Words(nn.Embedding(5, 3, padding_idx=0)),
    "embedding bag": lambda: Words(nn.EmbeddingBag(5, 3)),
    "convolution, max pooling": lambda: Through(
        nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2)), (1, 3, 3), 2
    ),
    "convolution, mean pooling": lambda: Through(
        nn.Sequential(nn.Conv2d(1, 2, 2), nn.AdaptiveAvgPool2d(1)), (1, 3, 3), 2
    ),
    "transposed convolution": lambda: Through(nn.ConvTranspose1d(2, 1, 2), (2, 3), 4),
    "upsampling": lambda: Through(nn.Upsample(scale_factor=2, mode="bilinear"), (1, 2, 2), 16),
    "batch norm": lambda: Through(nn.BatchNorm1d(4), (4,), 4),
    "batch norm, eval": lambda: evaluated(Through(nn.BatchNorm1d(4), (4,), 4)),
    "group norm": lambda: Through(nn.GroupNorm(2, 4), (4, 2), 8),
    "instance norm": lambda: Through(nn.InstanceNorm1d(2, affine=True), (2, 3), 6),
    "layer norm": lambda: Through(nn.LayerNorm(4), (4,), 4),
    "RMS norm": lambda: Through(nn.RMSNorm(4), (4,), 4),
    "weight norm": lambda: Through(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (4,), 3),
    "weight norm, written by hand": lambda: Through(normed(nn.Linear(4, 3)), (4,), 3),
    "spectral norm": lambda: Through(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), (4,), 3),
    "spectral norm, eval": lambda: evaluated(
        Through(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), (4,), 3)
    ),
    "grid sample": lambda: Through(nn.Linear(4, 8), (1, 2, 2), 4, sampled),
    "checkpoint, re-entrant": lambda: Through(
        nn.Sequential(nn.Linear(4, 3), nn.Tanh()), (4,), 3, checkpointed(True)
    ),
    "checkpoint": lambda: Through(nn.Sequential(nn.Linear(4, 3), nn.Tanh()), (4,), 3, checkpointed(False)),
    "compiled": lambda: Through(torch.compile(nn.Linear(4, 3), backend="aot_eager"), (4,), 3),
    "activations": lambda: Through(
        nn.Sequential(nn.PReLU(), nn.GELU(), nn.Softplus(), nn.ELU(), nn.Hardswish()), (4,), 4
    ),
    "SiLU and Mish": lambda: Through(nn.Sequential(nn.SiLU(), nn.Mish()), (4,), 4),
    "bilinear": lambda: Through(nn.Bilinear(3, 3, 2), (3,), 2, lambda m, z: m(z, z)),
    "distances": lambda: Through(nn.Linear(4, 3), (4,), 6, lambda m, z: torch.cdist(m(z), m(z))),
}


def predict(model, hyper, batch):
    return model(batch[0])


def loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def problem_of(model):
    decay = br.hyperparameters.WeightDecay(model, initial=0.05, per="tensor")
    return br.Problem(
        model,
        decay,
        lambda m, h, b: loss(predict(m, h, b), b) + h(m),
        lambda m, h, b: loss(predict(m, h, b), b),
    )


CURVATURES = {
    "Hessian": lambda decay: br.Hessian(),
    "GaussNewton": lambda decay: br.GaussNewton(predict, loss, decay),
    "EmpiricalFisher": lambda decay: br.EmpiricalFisher(
        lambda m, h, b: F.cross_entropy(predict(m, h, b), b[1], reduction="none"), decay
    ),
    "KFAC": lambda decay: br.KFAC(predict, loss, decay),
    "FiniteDifference": lambda decay: br.FiniteDifference(),
}


def jacobian(problem, batch):
    """∂outputs/∂w, [N · 2, weights], by one backward pass for each output."""
    rows = []
    with problem.undisturbed(seed=3, twice=False) as passes:
        for index in range(2 * N):
            passes.replay()
            output = predict(problem.model, problem.hyper, batch).reshape(-1)[index]
            rows.append(_tree.flatten(gradient(output, problem.weights)))
    return torch.stack(rows)


@functools.cache
def made(name):
    torch.manual_seed(0)
    return problem_of(MODELS[name]()), (torch.randn(N, 3), torch.randint(2, (N,)))


@functools.cache
def known(name):
    """What a hypergradient is made of, from first derivatives alone."""
    problem, batch = made(name)
    with problem_with_seed(problem):
        hessian = differences(problem, batch, problem.weights)
        mixed = differences(problem, batch, problem.hyperparameters)
    with problem.undisturbed(seed=3) as passes:
        _, of_val, _ = validation_gradient(passes, batch, Reading(passes, batch))  # tested by itself
    with problem.undisturbed(seed=3) as passes, torch.no_grad():
        passes.replay()
        p = predict(problem.model, problem.hyper, batch).softmax(1)
    J = jacobian(problem, batch).view(N, 2, -1)
    # Weights whose gradient is zero by decree, such as the row of a padding index.
    frozen = ~(hessian - torch.diag(hessian.diag())).any(dim=1)
    hessian[:, frozen] = torch.diag(hessian.diag())[:, frozen]
    J[..., frozen] = 0.0
    H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    g = torch.einsum("nc,nci->ni", p - F.one_hot(batch[1], 2), J)
    decays = problem.hyper.curvature_diagonal(problem.model)
    rest = torch.diag(
        torch.cat([decays[n].reshape(-1).expand(w.numel()) for n, w in problem.weights.items()])
    )
    matrices = {
        # Where the gradient is none (constant singular vectors) the solver takes the symmetric part.
        "Hessian": (hessian + hessian.T) / 2,
        "GaussNewton": torch.einsum("nci,ncd,ndj->ij", J, H, J) / N + rest,
        "EmpiricalFisher": g.T @ g / N + rest,
    }
    return _tree.flatten(of_val), mixed, matrices


class problem_with_seed:
    """Run `differences`, which draws from the caller's random state, with the state that a seed of three gives."""

    def __init__(self, problem):
        self.problem = problem

    def __enter__(self):
        self.plain = self.problem.undisturbed
        self.problem.undisturbed = lambda *_, **more: self.plain(seed=3, **more)

    def __exit__(self, *_):
        del self.problem.undisturbed


# What may be refused: part of the message. What is not refused must be right.
REFUSED = {
    "weight norm": "weight_norm.*your own parametrization",
    "checkpoint, re-entrant": "checkpoint.*use_reentrant=False",
    "compiled": "torch.compile.*without torch.compile",
    "distances": "cdist.*FiniteDifference",
}
if torch.__version__ < (2, 13):
    REFUSED["grid sample"] = "grid_sampler_2d_backward.*FiniteDifference"


def hypergradient(problem, batch, kind):
    method = br.Implicit(br.Exact(damping=0.1), CURVATURES[kind](problem.hyper))
    return _tree.flatten(br.hypergradient(problem, batch, batch, method, seed=3).total)


@pytest.mark.parametrize("where", ["inside the model", "beside it"])
def test_differences_agree_on_hyperparameters_inside_the_model(where):
    drop = br.hyperparameters.ConcreteDropout(5)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), drop, nn.Linear(5, 2))
    decay = br.hyperparameters.WeightDecay(model, initial=0.05, per="tensor", exclude=["2.*"])
    model.tuned = nn.ModuleDict({"drop": drop, "decay": decay})
    hyper = model.tuned if where == "inside the model" else decay
    if where == "beside it":
        del model.tuned
        drop.requires_grad_(False)

    def train(m, h, b):
        return loss(
            nn.Sequential.forward(m, b[0]) if where == "beside it" else m[3](m[2](m[1](m[0](b[0])))), b
        ) + (h["decay"] if where == "inside the model" else h)(m)

    problem = br.Problem(model, hyper, train, lambda m, h, b: loss(m[3](m[1](m[0](b[0]))), b))
    batch = (torch.randn(N, 3), torch.randint(2, (N,)))
    found = [
        _tree.flatten(
            br.hypergradient(problem, batch, batch, br.Implicit(br.Exact(0.1), curvature), seed=3).total
        )
        for curvature in (br.Hessian(), br.FiniteDifference())
    ]
    assert torch.allclose(*found, rtol=1e-6, atol=1e-10)
    assert float(found[0].norm()) > 0


def refused(name, kind):
    """The words of a refusal that is allowed; its way out is another row or column of the table."""
    if kind == "FiniteDifference" and name != "checkpoint, re-entrant":
        return None
    return REFUSED.get(name)


@pytest.mark.filterwarnings(
    "ignore:Exact needs an invertible", "ignore:the linear solve ended", "ignore:The .grad attribute"
)
@pytest.mark.filterwarnings("ignore:spectral_norm at")
@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("name", MODELS)
def test_right_or_refused(name, kind):
    problem, batch = made(name)
    try:
        found = hypergradient(problem, batch, kind)
    except br.Error as error:
        words = refused(name, kind)
        if words is None or not re.search(words, str(error), re.DOTALL):
            raise
        return
    b, mixed, matrices = known(name)
    A = matrices.get(kind, matrices["Hessian"])
    if kind == "KFAC":  # has tests of its own
        with problem.undisturbed(seed=3) as passes:
            A = dense(
                CURVATURES[kind](problem.hyper).linearise(passes, batch), _tree.detached(problem.weights)
            )
    expected = -torch.linalg.solve(A + 0.1 * torch.eye(len(A)), b) @ mixed
    error = float((found - expected).norm() / expected.norm())
    # In training mode torch differentiates once through singular vectors as constants: told by a warning.
    exact = name != "spectral norm" or kind in ("FiniteDifference",)
    assert error < (1e-5 if exact else 0.2), error


@pytest.mark.parametrize(
    "make", [lambda: br.Unrolled(3, 0.1), lambda: br.Forward(3, 0.1)], ids=["Unrolled", "Forward"]
)
def test_methods_that_put_other_tensors_in_place_refuse_checkpoints(make):
    # Computed again in the backward pass, the part would see the weights themselves.
    problem, batch = made("checkpoint")
    with pytest.raises(br.Error, match="without torch.utils.checkpoint"):
        br.hypergradient(problem, batch, batch, make())
