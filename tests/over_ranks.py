"""Checks that each of several processes runs: `test_ranks.py` starts them. A name or more on the command line chooses.

Every check compares a problem over the group, each rank with its own batch, with one process on the joined batch.
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import bestresponse as br
from bestresponse.hyperparameters import Weights

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROWS = 48


def data(seed=5, rows=ROWS):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=g), torch.randint(0, 3, (rows,), generator=g)


def part(batch, ends=None):
    """The rows of this rank: equal numbers, or up to the ends."""
    ends = ends or [(r + 1) * len(batch[0]) // WORLD for r in range(WORLD)]
    rows = slice(0 if RANK == 0 else ends[RANK - 1], ends[RANK])
    return tuple(x[rows] for x in batch)


def unequal():
    """The ends of parts of 5, 11, ... rows, the last with the rest."""
    return [*(5 * (r + 1) + r for r in range(WORLD - 1)), ROWS]


def network(*layers):
    torch.manual_seed(0)
    layers = layers or (nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    net = nn.Sequential(*layers)
    for p in net.parameters():
        nn.init.normal_(p, std=0.4)
    return net, nn.ParameterDict({"l": nn.Parameter(torch.tensor([-2.0, -3.0]))})


def decay(model, hyper, batch):
    weights = [p for p in model.parameters() if p.ndim > 1]
    return hyper["l"][0].exp() * weights[0].square().sum() + hyper["l"][1].exp() * weights[-1].square().sum()


def outputs(model, hyper, batch):
    return model(batch[0])


def fit(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


def train(model, hyper, batch):
    return fit(model(batch[0]), batch) + decay(model, hyper, batch)


def val(model, hyper, batch):
    return fit(model(batch[0]), batch)


def examples(model, hyper, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def adam(problem, batch):
    """An optimiser of the weights after one step along the same gradients as on the other ranks."""
    optimizer = torch.optim.Adam(problem.weights.values(), 1e-3)
    generator = torch.Generator().manual_seed(3)
    for w in problem.weights.values():
        w.grad = torch.randn(w.shape, generator=generator)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def total(method, batch, val_batch, group=None, *layers, **settings):
    net, hyper = network(*layers)
    wrap = DistributedDataParallel if group == "DDP" else lambda x: x
    settings = {} if group in (None, "DDP") else {"group": group, **settings}
    problem = br.Problem(wrap(net), hyper, train, val, **settings)
    h = br.hypergradient(problem, batch, val_batch, method, seed=1, weight_optimizer=adam(problem, batch))
    return torch.cat([x.reshape(-1) for x in h.total.values()])


def same_on_all_ranks(x):
    found = [torch.empty_like(x) for _ in range(WORLD)]
    dist.all_gather(found, x)
    assert all(torch.equal(y, found[0]) for y in found), found


def close(measured, expected, tolerance=1e-10):
    same_on_all_ranks(measured)
    assert float((measured - expected).norm() / expected.norm()) < tolerance, (measured, expected)


CG = br.ConjugateGradient(200, 1e-12, damping=1e-2)
METHODS = {
    "default": br.Implicit,
    "conjugate gradient": lambda: br.Implicit(CG),
    "Neumann": lambda: br.Implicit(br.Neumann(20, scale=0.1)),
    "FiniteDifference": lambda: br.Implicit(CG, br.FiniteDifference()),
    "GaussNewton": lambda: br.Implicit(CG, br.GaussNewton(outputs, fit, decay)),
    "Unrolled": lambda: br.Unrolled(4, 0.1, rule=br.rules.Adam()),
    "Penalty": lambda: br.Penalty(steps=4, step_size=0.1),
    "SAMA": br.SAMA,
}
MORE = {
    "Identity": lambda: br.Implicit(br.Identity()),
    "Exact": lambda: br.Implicit(br.Exact(damping=1e-2)),
    "automatic scale": lambda: br.Implicit(br.Neumann(20)),
    "MINRES": lambda: br.Implicit(br.MINRES(200, 1e-12, damping=1e-2)),
    "GMRES": lambda: br.Implicit(br.solvers.GMRES(200, 1e-12, damping=1e-2)),
    "Nystrom": lambda: br.Implicit(br.Nystrom(60, damping=0.1), br.GaussNewton(outputs, fit, decay)),
    "recycling": lambda: br.Implicit(br.ConjugateGradient(200, 1e-12, damping=1e-2, recycle=4)),
    "rest left out": lambda: br.Implicit(CG, br.GaussNewton(outputs, fit)),
    "EmpiricalFisher": lambda: br.Implicit(CG, br.EmpiricalFisher(examples, decay)),
    "KFAC": lambda: br.Implicit(CG, br.KFAC(outputs, fit, decay)),
    "preconditioner": lambda: br.Implicit(
        br.ConjugateGradient(6, damping=1e-2, preconditioner=br.KFAC(outputs, fit, decay))
    ),
    "momentum": lambda: br.Unrolled(4, 0.1, rule=br.rules.SGD(momentum=0.5), checkpoint_every=2),
    "last": lambda: br.Unrolled(5, 0.1, last=2),
    "interpolated": lambda: br.Unrolled(4, 0.1, trajectory="interpolated"),
    "Forward": lambda: br.Forward(4, 0.1, rule=br.rules.Adam()),
    "Halves": lambda: br.Halves(br.Implicit(CG)),
    "SAMA by Hessian": lambda: br.SAMA(curvature=br.Hessian()),
}


def check_few_methods():
    for name in ("default", "Unrolled", "Penalty"):
        expected = total(METHODS[name](), data(), data(6), None)
        close(total(METHODS[name](), part(data()), part(data(6)), dist.group.WORLD), expected)


def check_methods():
    """DistributedDataParallel, or a bare module with the group."""
    for name, make in METHODS.items():
        expected = total(make(), data(), data(6))
        tolerance = 1e-8 if "Difference" in name or name == "SAMA" else 1e-10
        group = "DDP" if len(name) % 2 else dist.group.WORLD
        close(total(make(), part(data()), part(data(6)), group), expected, tolerance)


def check_more_methods():
    for name, make in MORE.items():
        expected = total(make(), data(), data(6))
        assert expected.norm() > 0, name
        close(total(make(), part(data()), part(data(6)), "DDP"), expected, 1e-8)


def check_unequal_batches():
    ends = unequal()
    for make in (
        METHODS["default"],
        METHODS["GaussNewton"],
        METHODS["Unrolled"],
        METHODS["Penalty"],
        MORE["KFAC"],
    ):
        expected = total(make(), data(), data(6))
        own, own_val = part(data(), ends), part(data(6), ends[::-1] if WORLD == 1 else ends)
        by_function = total(make(), own, own_val, dist.group.WORLD, batch_size=lambda b: len(b[1]))
        close(by_function, expected, 1e-8)
        by_weights = [br.Batches([b], weights=[len(b[1])]) for b in (own, own_val)]
        close(total(make(), *by_weights, dist.group.WORLD), expected, 1e-8)


def check_dropout():
    """Each rank has masks of its own: those of the pieces of `Batches` in one process."""
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 3)
    pieces = [tuple(x[r * ROWS // WORLD : (r + 1) * ROWS // WORLD] for x in data()) for r in range(WORLD)]
    for make in (METHODS["default"], METHODS["GaussNewton"], METHODS["Unrolled"], METHODS["Penalty"]):
        expected = total(make(), br.Batches(pieces), data(6), None, *layers)
        close(total(make(), part(data()), part(data(6)), "DDP", *layers), expected, 1e-9)


def check_running_statistics():
    """Of the mean over the ranks: ∂L_V/∂s is that of the joined batch, and s the mean of the ranks' own."""

    def layers():
        return slow((nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))

    pieces = [tuple(x[r * ROWS // WORLD : (r + 1) * ROWS // WORLD] for x in data()) for r in range(WORLD)]
    for make in (METHODS["default"], METHODS["Penalty"]):
        # A momentum so small that the shares of several batches are equal.
        expected = total(make(), br.Batches(pieces), data(6), None, *layers())
        close(total(make(), part(data()), part(data(6)), "DDP", *layers()), expected, 1e-5)


def slow(layers):
    for layer in layers:
        if isinstance(layer, nn.BatchNorm1d):
            layer.momentum = 1e-7
    return layers


def check_errors_are_shared():
    """A rank's error is an error of all, of the same class; and the group works afterwards."""
    net, hyper = network()
    problem = br.Problem(net, hyper, train, val, group=dist.group.WORLD)
    own, own_val = part(data()), part(data(6))
    broken = (own[0] * (float("nan") if RANK == WORLD - 1 else 1.0), own[1])
    for batch, val_batch in ((broken, own_val), (own, broken), (None if RANK else own, own_val)):
        error = raised(problem, batch, val_batch)
        if batch is None:
            assert isinstance(error, TypeError)
        else:
            assert isinstance(error, br.Error)
            assert "on rank" in str(error) or RANK == WORLD - 1
    close(
        br.hypergradient(problem, own, own_val, br.Implicit(CG)).total["l"],
        one_process(br.Implicit(CG)),
        1e-10,
    )
    with torch.no_grad():
        net[0].weight += RANK
    assert "must be the same on all ranks; 0.weight differ" in str(raised(problem, own, own_val))


def raised(problem, batch, val_batch):
    """The error of a hypergradient."""
    try:
        br.hypergradient(problem, batch, val_batch, br.Implicit())
    except Exception as error:
        return error
    raise AssertionError("no error")


def one_process(method):
    net, hyper = network()
    return br.hypergradient(br.Problem(net, hyper, train, val), data(), data(6), method).total["l"]


def check_tables():
    """Sparse gradients of a table of example weights: the rows of all ranks."""

    def weighted_loss(model, hyper, batch):
        index, inputs, targets = batch
        losses = F.cross_entropy(model(inputs), targets, reduction="none")
        return (hyper(index) * losses).mean() + 0.01 * sum(p.square().sum() for p in model.parameters())

    def run(batch, val_batch, table=None, method=None, **settings):
        net, _ = network()
        problem = br.Problem(net, table or Weights(ROWS), weighted_loss, val, **settings)
        return br.hypergradient(problem, batch, val_batch, method or br.Implicit(CG)).total["table"]

    index = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    batch = index, *data()
    expected = run(batch, data(6))
    measured = run(part(batch), part(data(6)), group=dist.group.WORLD)
    assert measured.is_sparse
    close(measured.to_dense(), expected.to_dense())

    # Each rank's table has the weights of its own examples; the joined one has all of them.
    for method in (br.Implicit(CG), br.Unrolled(3, 0.1)):
        joined = run((torch.arange(ROWS), *data()), data(6), method=method).to_dense()
        mine = torch.arange(len(part(data())[0])), *part(data())
        own = Weights(len(mine[0]), sharded=True)
        measured = run(mine, part(data(6)), own, method, group=dist.group.WORLD).to_dense()
        assert (measured - part((joined,))[0]).norm() < 1e-10 * joined.norm()
        own.table.data += RANK  # the tables of the ranks may differ
        run(mine, part(data(6)), own, method, group=dist.group.WORLD)


def check_one_reduction_a_product():
    net, hyper = network()
    problem = br.Problem(net, hyper, train, val, group=dist.group.WORLD, verify=False)
    own, own_val = part(data()), part(data(6))
    counts = []
    for terms in (5, 5, 15):
        before = problem.group.calls
        h = br.hypergradient(problem, own, own_val, br.Implicit(br.Neumann(terms, scale=0.1)))
        counts.append((problem.group.calls - before, h.solve.products))
    (_, products), (few, _), (many, more) = counts
    assert many - few == more - products, counts
    assert few - products <= 7, counts


def check_nested():
    """DistributedDataParallel inside the model, and as hyper; its own hooks never run."""
    net, hyper = network()
    nested = nn.Sequential(net[0], net[1], DistributedDataParallel(net[2]))
    problem = br.Problem(nested, hyper, train, val)
    assert problem.group.size == WORLD
    tuner = tuner_of(problem)
    tuner.fit([part(data())], [part(data(6))], 3)
    one = tuner_of(br.Problem(*network(), train, val))
    one.fit([data()], [data(6)], 3)
    close(problem.hyperparameters["l"].detach(), one.problem.hyperparameters["l"].detach(), 1e-10)


def tuner_of(problem, method=None, **settings):
    return br.Tuner(
        problem,
        torch.optim.Adam(problem.weights.values(), 1e-2),
        torch.optim.Adam(problem.hyperparameters.values(), 5e-2),
        method or br.Implicit(),
        **settings,
    )


class Experts(nn.Module):
    """One of two layers, by the sign of the first input: the ranks reach different weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def chosen(self, x):
        return self.experts[int(x[0, 0] >= 0)]

    def forward(self, x):
        return self.chosen(x)(x)


def check_experts():
    def loss(model, hyper, batch):
        return val(model, hyper, batch) + hyper["l"].exp() * model.chosen(batch[0]).weight.square().sum()

    def batch(number, seed):
        x, y = data(seed, 24)
        return torch.cat([x[:, :1].abs() * (-1) ** number, x[:, 1:]], 1), y

    def run(batches, val_batches, method, **settings):
        hyper = nn.ParameterDict({"l": nn.Parameter(torch.tensor(-2.0))})
        problem = br.Problem(Experts(), hyper, loss, val, **settings)
        return br.hypergradient(problem, batches, val_batches, method).total["l"]

    pieces, val_pieces = ([batch(r, seed + r) for r in range(WORLD)] for seed in (20, 30))
    for name in ("conjugate gradient", "Unrolled", "Penalty"):
        expected = run(br.Batches(pieces), br.Batches(val_pieces), METHODS[name]())
        close(run(pieces[RANK], val_pieces[RANK], METHODS[name](), group=dist.group.WORLD), expected)


def check_influence():
    def run(batches, queries, **settings):
        net, hyper = network()
        problem = br.Problem(net, hyper, train, val, **settings)
        return br.influence(problem, batches, queries, br.Implicit(CG)).scores["l"]

    batches = [tuple(x[i::2] for x in data()) for i in range(2)]
    expected = run(batches, [data(6), data(7)])
    measured = run([part(b) for b in batches], [part(data(6)), part(data(7))], group=dist.group.WORLD)
    close(measured, expected)


def check_runs():
    """A run of 100 hyper-steps, with everything that decides: early stopping, a watch, a plateau's scheduler."""

    def run(batches, problem):
        weights = torch.optim.Adam(problem.weights.values(), 1e-2)
        hypers = torch.optim.Adam(problem.hyperparameters.values(), 5e-2)
        tuner = br.Tuner(
            problem,
            weights,
            hypers,
            br.Implicit(),
            clip_weights=0.5,
            weight_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(weights, patience=3),
            watch=[batches(7)],
            callbacks=[br.callbacks.Evaluate(lambda m, h: {"of": float(val(m, h, batches(8)))}, every=7)],
        )
        tuner.fit([batches(5), batches(9)], [batches(6)], 100)
        return tuner

    def of_rank(seed):
        return part(data(seed))

    many = run(of_rank, br.Problem(DistributedDataParallel(network()[0]), network()[1], train, val))
    one = run(data, br.Problem(*network(), train, val))
    close(many.problem.hyperparameters["l"].detach(), one.problem.hyperparameters["l"].detach(), 1e-6)
    for mine, theirs in zip(many.history, one.history, strict=True):
        for key in ("train_loss", "val_loss", "watch_loss", "of", "hypergradient_norm"):
            assert abs(mine.get(key, 0.0) - theirs.get(key, 0.0)) < 1e-6 * abs(theirs.get(key, 1.0)), key


def sharded(*layers):
    """The network in FSDP2, a block at a time, with the hyperparameters outside of it."""
    net, hyper = network(*layers)
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in net:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, hyper


SHARDED = {
    name: (METHODS | MORE)[name]
    for name in (
        "default",
        "conjugate gradient",
        "Neumann",
        "automatic scale",
        "Identity",
        "MINRES",
        "FiniteDifference",
        "GaussNewton",
        "rest left out",
        "Penalty",
        "SAMA",
        "SAMA by Hessian",
        "Halves",
    )
}


def check_sharded():
    """FSDP2: every method that runs on sharded weights; the others raise."""
    for name, make in SHARDED.items():
        # With sharded weights Implicit() keeps the Hessian.
        whole = br.Implicit(curvature=br.Hessian()) if name == "default" else make()
        expected = total(whole, data(), data(6))
        problem = br.Problem(*sharded(), train, val)
        optimizer = sharded_adam(problem)
        own, own_val = part(data()), part(data(6))
        h = br.hypergradient(problem, own, own_val, make(), seed=1, weight_optimizer=optimizer)
        close(h.total["l"], expected, 1e-8 if "Difference" in name or name == "SAMA" else 1e-10)
    others = (METHODS | MORE).keys() - SHARDED.keys()
    for name in sorted(others):
        try:
            br.hypergradient(problem, own, own_val, (METHODS | MORE)[name]())
        except br.Error as error:
            text = str(error)
        assert "needs whole weights" in text, name


def check_sharded_batches():
    """Batches that count differently are refused; those of one process are the same."""
    method = br.Implicit(CG)
    expected = total(method, data(), data(6))
    problem = br.Problem(*sharded(), train, val)
    sharded_adam(problem)
    halves = [tuple(x[i::2] for x in part(data())) for i in range(2)]
    batches = br.Batches(halves, weights=[1, 1], recompute=True)
    close(br.hypergradient(problem, batches, part(data(6)), method, seed=1).total["l"], expected)
    uneven = br.Batches(halves, weights=[1, 1 + RANK])
    try:
        br.hypergradient(problem, uneven, part(data(6)), method)
    except br.Error as error:
        text = str(error)
    assert "must have the same sum of the weights of Batches" in text


def sharded_adam(problem):
    """As `adam`, with the shards of the same gradients."""
    optimizer = torch.optim.Adam(problem.weights.values(), 1e-3)
    generator = torch.Generator().manual_seed(3)
    for w in problem.weights.values():
        whole = torch.randn(w.shape, generator=generator)
        w.grad = distribute_tensor(whole, w.device_mesh, w.placements)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def check_sharded_run():

    def watched(batches):
        def measured(model, hyper):
            return {"of": float(val(model, hyper, batches(8)))}

        callbacks = [br.callbacks.Evaluate(measured, 10), br.callbacks.KeepBest("of")]
        return {"watch": [batches(7)], "callbacks": callbacks}

    hessian = br.Implicit(curvature=br.Hessian())  # which Implicit() keeps with sharded weights
    one = tuner_of(br.Problem(*network(), train, val), hessian, clip_weights=0.5, **watched(data))
    one.fit([data(), data(9)], [data(6)], 30)
    many = tuner_of(
        br.Problem(*sharded(), train, val), clip_weights=0.5, **watched(lambda seed: part(data(seed)))
    )
    many.fit([part(data()), part(data(9))], [part(data(6))], 30)
    close(many.problem.hyperparameters["l"].detach(), one.problem.hyperparameters["l"].detach(), 1e-8)
    for mine, theirs in zip(many.history[9::10], one.history[9::10], strict=True):
        assert all(
            abs(mine[key] - theirs[key]) < 1e-8 for key in ("watch_loss", "of", "train_loss", "val_loss")
        )


def saved(problem, path):
    """A tuner that writes its run."""
    return tuner_of(
        problem, callbacks=[br.callbacks.Checkpoint(path), br.callbacks.JSONLines(f"{path}.jsonl")]
    )


def check_saving(path):
    """Two runs of four hyper-steps, of which one is saved; the other's end is in a second file."""
    for steps, place in ((8, f"{path}-whole"), (4, path)):
        tuner = saved(br.Problem(DistributedDataParallel(network()[0]), network()[1], train, val), place)
        tuner.fit([part(data()), part(data(9))], [part(data(6))], steps)
    if RANK == 0:
        with open(f"{path}.jsonl") as file:
            assert len(list(file)) == 4


def check_resuming(path):
    """With as many ranks it is the same run to the last bit."""
    net = network()[0]
    model = net if WORLD == 1 else DistributedDataParallel(net)
    tuner = tuner_of(br.Problem(model, network()[1], train, val))
    tuner.load(path)
    tuner.fit([part(data()), part(data(9))], [part(data(6))], 4)
    whole = torch.load(f"{path}-whole", weights_only=True)["modules"]["hyper"]["state"]["l"]
    close(tuner.problem.hyperparameters["l"].detach(), whole, 1e-15 if WORLD == 2 else 1e-8)


def check_endless():
    net, hyper = network()
    tuner = tuner_of(br.Problem(net, hyper, train, val, group=dist.group.WORLD))
    print("began", flush=True)
    tuner.fit([part(data())], [part(data(6))], 10**6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    names = list(sys.argv[1:])
    while names:
        name = names.pop(0)
        globals()[f"check_{name}"](*(names and "/" in names[0] and [names.pop(0)]) or [])
        print(f"rank {RANK}: {name} passed", flush=True)
    dist.destroy_process_group()
