"""Everything public with valid arguments, of which a fuzz test makes some malformed."""

import math
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import linear

import bestresponse as br
from bestresponse import hyperparameters
from bestresponse.runs import callbacks

# What a caller might pass by mistake.
ODD = {
    "None": None,
    "True": True,
    "zero": 0,
    "minus one": -1,
    "three": 3,
    "a half": 0.5,
    "two and a half": 2.5,
    "NaN": math.nan,
    "infinity": math.inf,
    "a very large number": 10**30,
    "a text": "x",
    "an empty text": "",
    "an empty list": [],
    "a list": [1, 2],
    "an empty dict": {},
    "a dict": {"a": 1},
    "a function": lambda *args: None,
    "an object": object(),
    "bytes": b"\x00",
    "a complex number": 1j,
    "a scalar tensor": torch.tensor(0.5),
    "a tensor": torch.ones(2, 2),
    "an empty tensor": torch.ones(0),
    "a tensor of integers": torch.ones(2, dtype=torch.long),
    "a module": nn.Linear(2, 2),
    "a path": Path("/dev/null/x"),
    "an iterator": iter([]),
}


@dataclass
class Target:
    """A callable with valid arguments, and what is done with its result."""

    make: Any
    arguments: dict[str, Any] = field(default_factory=dict)
    use: Any = lambda result: None

    def run(self, changes):
        """Call it with some arguments changed, and use the result."""
        return self.use(self.make(**{**self.arguments, **changes}))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


def batch(kind=torch.get_default_dtype):
    x = torch.linspace(-1, 1, 12, dtype=kind()).sin().view(6, 2)
    return x, torch.arange(6) % 2


def predict(model, hyper, b):
    return model(b[0])


def fit(outputs, b):
    return F.cross_entropy(outputs, b[1])


def val_loss(model, hyper, b):
    return fit(predict(model, hyper, b), b)


def train_loss(model, hyper, b):
    return val_loss(model, hyper, b) + hyper(model)


def rest(model, hyper, b):
    return hyper(model)


def problem():
    net = model()
    return br.Problem(net, hyperparameters.WeightDecay(net, initial=0.01), train_loss, val_loss)


def hypergradient(method):
    return br.hypergradient(problem(), batch(), batch(), method)


def solved(solver):
    return hypergradient(br.Implicit(solver))


def curved(curvature):
    return hypergradient(br.Implicit(br.Neumann(2), curvature))


def ruled(rule):
    return hypergradient(br.Unrolled(2, 0.1, rule=rule))


def tuner(more=(), **arguments):
    one = problem()
    weights = torch.optim.SGD(one.weights.values(), 0.1)
    hyper = torch.optim.SGD(one.hyperparameters.values(), 0.1)
    return br.Tuner(one, weights, hyper, br.Implicit(br.Neumann(2)), callbacks=more, **arguments)


def fitted(one):
    return one.fit([batch()], [batch()], 2)


def called(callback):
    one = tuner([callback])
    fitted(one)
    getattr(callback, "state_dict", dict)()


def halved(callback):
    one = tuner([callback])
    one.method = br.Halves(br.Implicit(br.Neumann(2)))
    return fitted(one)


def decaying(module):
    return module(model()).backward()


def new(make, **arguments):
    """A target whose arguments are made anew for each call."""
    return lambda **changes: make(**{**{k: v() for k, v in arguments.items()}, **changes})


def targets(folder):
    """All targets by name; files are written to the folder."""
    twice = {"steps": 2, "step_size": 0.1}
    split = {"predict": predict, "loss": fit, "rest": rest}
    both = {"train_batch": batch(), "val_batch": batch(), "method": br.Implicit(br.Neumann(2)), "seed": 1}
    iterative = {"max_steps": 2, "tolerance": 1e-3, "damping": 0.1}
    return {
        "Implicit": Target(
            br.Implicit,
            {"solver": br.Neumann(2), "curvature": br.Hessian(), "warm_start": False},
            hypergradient,
        ),
        "Unrolled": Target(
            br.Unrolled,
            {**twice, "last": 1, "rule": br.rules.SGD(), "checkpoint_every": 1, "trajectory": "exact"},
            hypergradient,
        ),
        "Forward": Target(br.Forward, {**twice, "rule": br.rules.SGD(), "chunk": 2}, hypergradient),
        "Penalty": Target(br.Penalty, {**twice, "multiplier": 10.0}, hypergradient),
        "SAMA": Target(br.SAMA, {"rule": br.rules.SGD(), "curvature": br.Hessian()}, hypergradient),
        "Halves": Target(br.Halves, {"method": br.Direct()}, hypergradient),
        "Neumann": Target(br.Neumann, {"terms": 2, "scale": 0.1, "fresh_batches": False}, solved),
        "ConjugateGradient": Target(
            br.ConjugateGradient, {**iterative, "recycle": 1, "diagonal": True}, solved
        ),
        "MINRES": Target(br.MINRES, {**iterative, "preconditioner": None}, solved),
        "GMRES": Target(br.solvers.GMRES, {**iterative, "preconditioner": None}, solved),
        "Nystrom": Target(br.Nystrom, {"rank": 2, "damping": 0.1}, solved),
        "Exact": Target(br.Exact, {"damping": 0.1, "limit": 100, "reuse": 1}, solved),
        "Inverse": Target(br.solvers.Inverse, {"curvature": br.KFAC(**split), "damping": 0.1}, solved),
        "SOBA": Target(br.solvers.SOBA, {"steps": 1, "step_size": 0.1, "decay": 0.0}, solved),
        "GaussNewton": Target(br.GaussNewton, split, curved),
        "KFAC": Target(br.KFAC, split, curved),
        "EmpiricalFisher": Target(
            br.EmpiricalFisher,
            {"example_loss": lambda m, h, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), "rest": rest},
            curved,
        ),
        "FiniteDifference": Target(br.FiniteDifference, {"step": 1e-3}, curved),
        "rules.SGD": Target(br.rules.SGD, {"momentum": 0.9, "dampening": 0.0, "nesterov": False}, ruled),
        "rules.Adam": Target(br.rules.Adam, {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}, ruled),
        "rules.AdamW": Target(br.rules.AdamW, {"weight_decay": 0.1}, ruled),
        "rules.like": Target(
            br.rules.like, {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)}
        ),
        "Problem": Target(
            new(br.Problem, model=model, hyper=lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(()))})),
            {
                "train_loss": lambda m, h, b: val_loss(m, h, b) + h["a"] * m[0].weight.square().sum(),
                "val_loss": val_loss,
                "val_mode": "eval",
                "verify": True,
            },
            lambda one: br.hypergradient(one, batch(), batch(), br.Implicit(br.Neumann(2))),
        ),
        "hypergradient": Target(new(br.hypergradient, problem=problem), {**both, "weight_optimizer": None}),
        "backward": Target(new(br.backward, problem=problem), both),
        "Batches": Target(
            br.Batches,
            {"iterable": [batch(), batch()], "weights": [1.0, 2.0], "recompute": False},
            lambda b: br.hypergradient(problem(), b, b, br.Implicit(br.Neumann(2))),
        ),
        "CrossEntropy": Target(
            br.losses.CrossEntropy,
            {"targets": lambda b: b[1], "ignore_index": -100, "label_smoothing": 0.1},
            lambda loss: curved(br.GaussNewton(predict, loss)),
        ),
        "Tuner": Target(
            tuner,
            {
                "weight_steps": 1,
                "warmup_steps": 1,
                "weight_scheduler": None,
                "hyper_scheduler": None,
                "clip_weights": 1.0,
                "clip_hypergradient": 1.0,
                "policy": "skip",
                "max_rise": 2.0,
                "seed": 0,
                "more": (),
                "watch": [batch()],
            },
            fitted,
        ),
        "Tuner's parts": Target(
            lambda **changes: br.Tuner(**{**vars_of(tuner()), **changes}),
            {},
            fitted,
        ),
        "Tuner.fit": Target(
            lambda **arguments: tuner().fit(**arguments),
            {"train_batches": [batch()], "val_batches": [batch()], "hyper_steps": 2},
        ),
        "Tuner.retrain": Target(
            lambda **arguments: tuner().retrain(**arguments),
            {
                "batches": [batch()],
                "steps": 2,
                "initialise": lambda m: m[0].reset_parameters(),
                "optimizer": None,
            },
        ),
        "Tuner.save": Target(lambda **arguments: tuner().save(**arguments), {"path": folder / "run.pt"}),
        "Tuner.load": Target(lambda **arguments: tuner().load(**arguments), {"path": folder / "none.pt"}),
        "Evaluate": Target(
            callbacks.Evaluate, {"function": lambda m, h: {"test": torch.ones(())}, "every": 1}, called
        ),
        "KeepBest": Target(callbacks.KeepBest, {"key": "val_loss", "mode": "min"}, called),
        "EarlyStopping": Target(
            callbacks.EarlyStopping, {"key": "val_loss", "patience": 2, "mode": "min"}, called
        ),
        "StopAtNoise": Target(callbacks.StopAtNoise, {"least": 0.1, "window": 2}, halved),
        "Checkpoint": Target(callbacks.Checkpoint, {"path": folder / "a.pt", "every": 1, "keep": 2}, called),
        "JSONLines": Target(callbacks.JSONLines, {"path": folder / "a.jsonl"}, called),
        "Watch": Target(callbacks.Watch, {"batches": [batch()], "every": 1, "patience": 1}, called),
        "WeightDecay": Target(
            new(hyperparameters.WeightDecay, model=model),
            {
                "per": "tensor",
                "power": 2,
                "initial": 0.01,
                "minimum": 1e-6,
                "maximum": 1.0,
                "exclude": ["0.bias"],
            },
            lambda decay: decay(model()),
        ),
        "ConcreteDropout": Target(
            hyperparameters.ConcreteDropout,
            {"shape": 2, "initial": 0.3, "shared": (), "temperature": 0.1, "minimum": 0.01, "maximum": 0.9},
            lambda module: module(batch()[0]),
        ),
        "DropConnect": Target(
            hyperparameters.DropConnect,
            {"shape": 2, "initial": 0.3, "temperature": 0.1, "minimum": 0.01, "maximum": 0.9},
            lambda module: module(batch()[0]),
        ),
        "Augmenter": Target(
            hyperparameters.Augmenter,
            {"channels": 1, "depth": 1, "width": 2, "bound": 0.5, "initial": 0.1},
            lambda module: module(torch.ones(2, 1, 4, 4)),
        ),
        "ExampleWeights": Target(
            hyperparameters.ExampleWeights,
            {"network": nn.Linear(2, 1)},
            lambda module: module(torch.ones(3, 2)),
        ),
        "LossWeights": Target(
            hyperparameters.LossWeights,
            {"network": nn.Linear(1, 1), "nodes": 16},
            lambda module: module(torch.ones(3)),
        ),
        "DistilledData": Target(
            hyperparameters.DistilledData,
            {
                "inputs": torch.ones(2, 2),
                "labels": torch.tensor([0, 1]),
                "classes": 2,
                "confidence": 0.9,
                "bounds": (0.0, 1.0),
            },
            lambda module: module(),
        ),
        "Weights": Target(
            hyperparameters.Weights,
            {"n": 4, "positive": "softplus", "initial": 1.0, "per": None, "mean_one": False, "sparse": True},
            lambda module: module(torch.tensor([0, 1])),
        ),
        "Indexed": Target(hyperparameters.Indexed, {"dataset": [1, 2]}),
        "Shrinkage": Target(
            hyperparameters.Shrinkage,
            {"strength": 0.1, "towards": None, "within": "tensor"},
            lambda shrinkage: hyperparameters.WeightDecay(model(), shrinkage=shrinkage).shrink_(),
        ),
        "Shrunk": Target(
            hyperparameters.Shrunk,
            {"module": nn.Linear(2, 1), "shrinkage": 0.1},
            lambda module: module.shrink_(),
        ),
        "LinearHypernetwork": Target(
            new(br.hypernetworks.LinearHypernetwork, problem=problem),
            {"scale": 0.5, "sampling": "local", "samples": 1, "max_entries": 10**6},
        ),
        "SelfTuning": Target(
            new(br.hypernetworks.SelfTuning, problem=problem),
            {"scale": 0.5, "entropy": 0.001, "samples": 1, "minimum": 0.01, "maximum": 3.0},
        ),
        "influence": Target(
            new(br.influence, problem=problem),
            {
                "train_batches": [batch()],
                "queries": [batch()],
                "method": br.Implicit(br.Neumann(2)),
                "solve_on": batch(),
                "size": 6.0,
                "seed": 0,
            },
        ),
        "Folds": Target(
            new(br.Folds, model=model, hyper=lambda: hyperparameters.WeightDecay(model())),
            {"train_loss": train_loss, "val_loss": val_loss, "folds": 2},
        ),
        "diagnostics.check": Target(
            new(br.diagnostics.check, problem=problem),
            {"train_batch": batch(), "val_batch": batch(), "retrain_steps": 0, "seed": 0, "progress": None},
        ),
    }


# Counts, of which a large one is a valid wish that takes for ever.
COUNTS = {
    *(
        "steps",
        "last",
        "chunk",
        "terms",
        "max_steps",
        "recycle",
        "rank",
        "weight_steps",
        "warmup_steps",
        "hyper_steps",
    ),
    *("samples", "folds", "nodes", "depth", "width", "channels", "n", "retrain_steps"),
}


def foreign(error):
    """Whether an error is neither one of the library nor raised by the caller's own functions, modules or batches."""
    if isinstance(error, br.Error):
        return False
    places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    ours = [i for i, place in enumerate(places) if "/src/bestresponse/" in place and "/passes/" not in place]
    callers = [i for i, place in enumerate(places) if place in (__file__, linear.__file__)]
    # The last of our frames, besides those that watch the caller's operations, called the caller's function.
    return not ours or not callers or callers[-1] < ours[-1]


def vars_of(one):
    """The arguments that a tuner was made with."""
    names = ("problem", "weight_optimizer", "hyper_optimizer", "method")
    return {name: getattr(one, name) for name in names}
