import os
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import bestresponse as br
from bestresponse.runs import callbacks


class Shuffled:
    """A collection with a generator of its own."""

    def __init__(self, batches, generator):
        self.batches, self.generator = batches, generator

    def __iter__(self):
        if isinstance(self.generator, torch.Generator):
            order = torch.randperm(len(self.batches), generator=self.generator).tolist()
        else:
            order = list(range(len(self.batches)))
            self.generator.shuffle(order)
        return (self.batches[i] for i in order)


class KeepsPosition:
    """A loader with a state_dict, whose order nobody could guess."""

    def __init__(self, batches):
        self.batches, self.at = batches, 0

    def __iter__(self):
        while self.at % 3 or not self.at:
            self.at += 1
            yield self.batches[(self.at * self.at) % len(self.batches)]
        self.at += 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def examples():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 3, generator=generator)
    return x, (x[:, 0] > 0).long()


def split_list():
    x, y = examples()
    return list(zip(x.split(6), y.split(6), strict=True))


class Noisy(TensorDataset):
    """Examples that are augmented when they are drawn, from the global generators."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(3) + 0.1 * random.random(), y


LOADERS = {
    "list": split_list,
    "shuffled by the global generator": lambda: DataLoader(
        TensorDataset(*examples()), batch_size=6, shuffle=True
    ),
    "shuffled by its own generator": lambda: DataLoader(
        TensorDataset(*examples()), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(8)
    ),
    "augmented": lambda: DataLoader(Noisy(*examples()), batch_size=6, shuffle=True),
    "two workers": lambda: DataLoader(Noisy(*examples()), batch_size=6, shuffle=True, num_workers=2),
    "a generator of torch": lambda: Shuffled(split_list(), torch.Generator().manual_seed(2)),
    "a generator of Python": lambda: Shuffled(split_list(), random.Random(2)),
    "state_dict": lambda: KeepsPosition(split_list()),
}


def kfac(**arguments):
    return br.KFAC(lambda m, h, b: m(b[0]), lambda o, b: F.cross_entropy(o, b[1]), **arguments)


METHODS = {
    "implicit": lambda: br.Implicit(),
    "preconditioned": lambda: br.Implicit(
        br.ConjugateGradient(2, damping=None, preconditioner=kfac(samples=2), recycle=3), warm_start=True
    ),
    "differences": lambda: br.Implicit(curvature=br.FiniteDifference()),
    "shrinking tolerance": lambda: br.Implicit(
        br.MINRES(20, tolerance=lambda solves: 0.5**solves), warm_start=True
    ),
    "recycled": lambda: br.Implicit(br.ConjugateGradient(2, damping=None, recycle=5), warm_start=True),
    "neumann": lambda: br.Implicit(br.Neumann(4)),
    "unrolled": lambda: br.Unrolled(2, 0.1),
    "unrolled Adam": lambda: br.Unrolled(2, 0.1, rule=br.rules.Adam()),
    "SAMA": lambda: br.SAMA(curvature=br.Hessian()),
    "penalty": lambda: br.Penalty(2, 0.05, lambda call: 5.0 + call, br.rules.SGD(0.9)),
}


def make(method="implicit", more=(), **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 2))
    model.register_buffer("steps", torch.zeros(()), persistent=False)
    decay = br.hyperparameters.WeightDecay(model, initial=0.01)

    def train_loss(model, decay, batch):
        model.steps += 1
        return F.cross_entropy(model(batch[0]), batch[1]) + decay(model) * (1 + 0.01 * model.steps)

    def val_loss(model, decay, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    problem = br.Problem(model, decay, train_loss, val_loss)
    weights = torch.optim.Adam(problem.weights.values(), 0.01)
    hyper = torch.optim.RMSprop(problem.hyperparameters.values(), 0.05)
    return br.Tuner(
        problem,
        weights,
        hyper,
        METHODS[method](),
        weight_steps=2,
        weight_scheduler=StepLR(weights, 5, 0.9),
        hyper_scheduler=MultiStepLR(hyper, [3, 7], 0.5),
        callbacks=more,
        **arguments,
    )


def everything(tuner):
    """What a run is, to the last bit."""
    problem = tuner.problem
    tensors = [
        *problem.model.state_dict().values(),
        problem.model.steps,
        *problem.hyper.state_dict().values(),
    ]
    for optimizer in (tuner.weight_optimizer, tuner.hyper_optimizer):
        tensors += [x for state in optimizer.state_dict()["state"].values() for x in state.values()]
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in tuner.history]
    return [x.tolist() for x in tensors], rows, torch.rand(3).tolist(), random.random()


def whole_run(loader, method="implicit"):
    tuner = make(method)
    batches = loader()
    torch.manual_seed(5)
    random.seed(5)
    tuner.fit(batches, batches if isinstance(batches, list) else split_list(), 11)
    return everything(tuner)


@pytest.mark.filterwarnings("ignore::bestresponse.BestResponseWarning")
@pytest.mark.parametrize("loader", LOADERS)
def test_a_saved_and_restored_run_goes_on_as_if_nothing_had_happened(loader, tmp_path):
    expected = whole_run(LOADERS[loader])
    tuner, batches = make(), LOADERS[loader]()
    torch.manual_seed(5)
    random.seed(5)
    tuner.fit(batches, split_list(), 4)
    tuner.save(tmp_path / "run.pt")
    torch.manual_seed(99)
    other = make()
    other.fit(split_list(), split_list(), 2)  # whatever it did before is gone
    fresh = LOADERS[loader]()
    other.load(tmp_path / "run.pt")
    torch.rand(7), random.random()
    other.fit(fresh, split_list(), 7)
    assert everything(other) == expected


@pytest.mark.filterwarnings("ignore::bestresponse.BestResponseWarning")
@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_remembers_is_restored(method, tmp_path):
    expected = whole_run(split_list, method)
    tuner = make(method)
    torch.manual_seed(5)
    random.seed(5)
    tuner.fit(split_list(), split_list(), 4)
    tuner.save(tmp_path / "run.pt")
    other = make(method)
    other.load(tmp_path / "run.pt")
    other.fit(split_list(), split_list(), 7)
    assert everything(other) == expected


@pytest.mark.filterwarnings("ignore::bestresponse.BestResponseWarning")
@pytest.mark.parametrize("loader", ["list", "shuffled by the global generator"])
def test_two_runs_of_the_same_collections_are_one(loader):
    expected = whole_run(LOADERS[loader])
    tuner, batches, val = make(), LOADERS[loader](), split_list()
    torch.manual_seed(5)
    random.seed(5)
    tuner.fit(batches, val, 4)
    tuner.fit(batches, val, 7)
    assert everything(tuner) == expected


def test_hyper_steps_are_deterministic_for_a_seed_and_may_be_interrupted(tmp_path):
    def run(*pieces):
        path = tmp_path / "run.pt"
        for number, steps in enumerate(pieces):
            tuner = make("recycled", seed=4)
            torch.manual_seed(5)
            if number:
                tuner.load(path)
            tuner.fit(LOADERS["shuffled by the global generator"](), split_list(), steps)
            tuner.save(path)
        return everything(tuner)[:2]

    assert run(50) == run(19, 31)


@pytest.mark.filterwarnings("ignore::bestresponse.BestResponseWarning")
def test_callbacks_go_on_too(tmp_path):
    def run(folder, *pieces):
        folder.mkdir()
        for number, steps in enumerate(pieces):
            best = callbacks.KeepBest()
            stopping = callbacks.EarlyStopping(patience=1000)
            lines = callbacks.JSONLines(folder / "rows.jsonl")
            # First in the list, and yet the last to be called.
            saving = callbacks.Checkpoint(folder / "run.pt", every=3)
            evaluate = callbacks.Evaluate(lambda model, hyper: {"scale": float(model[0].weight.norm())})
            tuner = make(more=[saving, best, stopping, lines, evaluate])
            torch.manual_seed(5)
            if number:
                tuner.load(folder / "run.pt")
                assert tuner.hyper_step == 6
            tuner.fit(split_list(), split_list(), steps)
            if number + 1 < len(pieces):  # two more steps of a run that is then killed
                tuner.callbacks.remove(saving)
                tuner.fit(split_list(), split_list(), 2)
        rows = [line.split(', "seconds"')[0] for line in (folder / "rows.jsonl").read_text().splitlines()]
        return rows, best.state_dict()["row"]["hyper_step"], stopping.state_dict()["best"]["val_loss"]

    assert run(tmp_path / "a", 11) == run(tmp_path / "b", 6, 5)


def test_a_killed_save_leaves_the_last_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.pt"
    tuner = make()
    tuner.fit(split_list(), split_list(), 2)
    tuner.save(path)
    before = path.read_bytes()

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        tuner.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.pt"]


def test_a_state_of_another_run_is_refused_and_nothing_is_changed(tmp_path):
    path = tmp_path / "run.pt"
    make().save(path)
    tuner = make()
    tuner.problem.model[4] = nn.Linear(4, 3)
    with pytest.raises(br.Error, match=r"model must have the saved tensors; it differs in \['4.bias"):
        tuner.load(path)
    tuner = make()
    tuner.weight_scheduler = None
    with pytest.raises(br.Error, match="made like the saved one"):
        tuner.load(path)
    tuner = make()
    first, *others = tuner.problem.weights.values()
    tuner.weight_optimizer = torch.optim.Adam([{"params": [first]}, {"params": others}], 0.1)
    before = everything(tuner)[0]
    with pytest.raises(br.Error, match="weight_optimizer must be like the saved one"):
        tuner.load(path)
    assert everything(tuner)[0] == before
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(br.Error, match="which cannot be read"):
        make().load(path)
    torch.save([1], path)
    with pytest.raises(br.Error, match="something else"):
        make().load(path)
    for bad in (tmp_path / "none", tmp_path):
        with pytest.raises(br.Error, match="which does not exist"):
            make().load(bad)
    path.write_text("hello")
    with pytest.raises(br.Error, match="which cannot be read"):
        make().load(path)


class Odd:
    """A callback that leaves all kinds of things in the history and in its state."""

    def __init__(self, what):
        self.what = what

    def __call__(self, tuner):
        tuner.history[-1] |= {
            "numpy": np.float64(1.5),
            "by class": [np.float32(0.5), 2],
            "array": np.arange(2),
        }

    def state_dict(self):
        return {"deep": [{"what": self.what}]}

    def load_state_dict(self, state):
        self.what = state["deep"][0]["what"]


def test_numbers_of_numpy_are_saved_as_plain_ones_and_other_things_are_refused_by_place(tmp_path):
    path = tmp_path / "deep" / "run.pt"
    tuner = make(more=[Odd(np.float64(2.0))])
    tuner.weight_optimizer.param_groups[0]["lr"] = np.float64(0.01)
    tuner.fit(split_list(), split_list(), 1)
    tuner.save(path)
    other = make(more=[Odd(None)])
    other.load(path)
    assert other.callbacks[0].what == 2.0
    row = other.history[0]
    assert (row["numpy"], row["by class"], row["array"]) == (1.5, [0.5, 2], [0, 1])
    before = path.read_bytes()
    tuner.callbacks[0].what = Odd
    with pytest.raises(br.Error, match=r"got a type at callbacks\[0\]\[1\]\['deep'\]\[0\]\['what'\]"):
        tuner.save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("has", "lacks"), [("state_dict", "load_state_dict"), ("load_state_dict", "state_dict")]
)
@pytest.mark.parametrize("place", ["callback", "weight_optimizer"])
def test_a_state_that_can_only_be_saved_or_only_be_loaded_is_refused(tmp_path, place, has, lacks):
    kind = type("Half", (), {"__call__": lambda self, *arguments: None, has: lambda self, *state: {}})
    make().save(tmp_path / "good.pt")
    tuner = make()
    if place == "callback":
        tuner.callbacks.append(kind())
    else:
        tuner.weight_optimizer = kind()
    before = {n: w.detach().clone() for n, w in tuner.problem.weights.items()}
    message = (
        f"{place} must have both state_dict and load_state_dict, or neither; Half has only {has}. Add {lacks}"
    )
    with pytest.raises(br.Error, match=message):
        tuner.save(tmp_path / "run.pt")
    assert not (tmp_path / "run.pt").exists()
    with pytest.raises(br.Error, match=message):
        tuner.load(tmp_path / "good.pt")
    assert all(torch.equal(w, before[n]) for n, w in tuner.problem.weights.items())


@pytest.mark.parametrize("path", ["", "file/run.pt", "folder"])
def test_a_path_that_cannot_be_written_to_is_told(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(br.Error, match="a path of a file that can be written"):
        make().save(path)


def test_a_run_that_was_loaded_and_saved_again_is_still_where_it_was(tmp_path):
    expected = whole_run(LOADERS["shuffled by the global generator"])
    tuner, batches = make(), LOADERS["shuffled by the global generator"]()
    torch.manual_seed(5)
    random.seed(5)
    tuner.fit(batches, split_list(), 4)
    tuner.save(tmp_path / "a.pt")
    between = make()
    between.load(tmp_path / "a.pt")
    torch.rand(3)
    between.save(tmp_path / "b.pt")
    other = make()
    other.load(tmp_path / "b.pt")
    other.fit(LOADERS["shuffled by the global generator"](), split_list(), 7)
    assert everything(other) == expected


def test_shared_buffers_stay_shared(tmp_path):
    def shared():
        tuner = make()
        tuner.problem.model[2].register_buffer("count", tuner.problem.model.steps, persistent=False)
        return tuner

    tuner = shared()
    tuner.fit(split_list(), split_list(), 2)
    tuner.save(tmp_path / "run.pt")
    other = shared()
    other.load(tmp_path / "run.pt")
    assert other.problem.model[2].count is other.problem.model.steps
    assert float(other.problem.model.steps) == float(tuner.problem.model.steps) > 0


def test_an_old_state_that_is_only_looked_at_leaves_the_log_alone(tmp_path):
    def run(steps, load):
        lines = callbacks.JSONLines(tmp_path / "rows.jsonl")
        tuner = make(more=[lines])
        if load:
            tuner.load(tmp_path / "run.pt")
        tuner.fit(split_list(), split_list(), steps)
        return tuner

    def steps_written():
        lines = (tmp_path / "rows.jsonl").read_text().splitlines()
        return [int(line.split('"hyper_step": ')[1].split(",")[0]) for line in lines]

    run(2, False).save(tmp_path / "run.pt")
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write('{"hyper_step": 3, "more": 1}\n{"hyper_st')
    make(more=[callbacks.JSONLines(tmp_path / "rows.jsonl")]).load(tmp_path / "run.pt")
    assert (tmp_path / "rows.jsonl").read_text().endswith('{"hyper_st')
    run(2, True)
    assert steps_written() == [1, 2, 3, 4]


def test_optimisers_of_another_kind_are_refused(tmp_path):
    make().save(tmp_path / "run.pt")
    tuner = make()
    tuner.weight_optimizer = torch.optim.SGD(tuner.problem.weights.values(), 0.1)
    with pytest.raises(br.Error, match="'weight_optimizer': 'Adam'.*got.*'weight_optimizer': 'SGD'"):
        tuner.load(tmp_path / "run.pt")


def test_persistent_workers_are_warned_of(tmp_path):
    tuner = make()
    loader = DataLoader(
        TensorDataset(*examples()), batch_size=6, num_workers=1, persistent_workers=True, shuffle=True
    )
    tuner.fit(loader, split_list(), 1)
    with pytest.warns(br.BestResponseWarning, match="persistent workers"):
        tuner.save(tmp_path / "run.pt")


def test_generators_deep_inside_a_loader_are_found(tmp_path):
    class Drawn(TensorDataset):
        def __init__(self, *tensors):
            super().__init__(*tensors)
            self.noise = np.random.RandomState(1)

        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + float(self.noise.rand()), y

    def loader():
        return DataLoader(torch.utils.data.Subset(Drawn(*examples()), range(30)), batch_size=6)

    expected = whole_run(loader)
    tuner = make()
    torch.manual_seed(5)
    random.seed(5)
    tuner.fit(loader(), split_list(), 4)
    tuner.save(tmp_path / "run.pt")
    other = make()
    other.load(tmp_path / "run.pt")
    other.fit(loader(), split_list(), 7)
    assert everything(other) == expected


def test_other_settings_are_named(tmp_path):
    make(seed=3).save(tmp_path / "run.pt")
    with pytest.warns(br.BestResponseWarning, match="the saved one had seed=3"):
        make(seed=4).load(tmp_path / "run.pt")


def test_parts_are_loaded_all_or_none(tmp_path):
    make().save(tmp_path / "run.pt")
    tuner = make()
    tuner.fit(split_list(), split_list(), 2)
    tuner.hyper_optimizer = torch.optim.RMSprop([torch.zeros(2, requires_grad=True)], 0.1)
    before = everything(tuner)[0]
    with pytest.raises(br.Error, match="hyper_optimizer must be like"):
        tuner.load(tmp_path / "run.pt")
    assert everything(tuner)[0] == before


def test_another_method_starts_without_memory_and_says_so(tmp_path):
    tuner = make("neumann")
    tuner.fit(split_list(), split_list(), 1)
    tuner.save(tmp_path / "run.pt")
    other = make("implicit")
    with pytest.warns(br.BestResponseWarning, match="its settings differ"):
        other.load(tmp_path / "run.pt")
    assert other.problem.state(other.method).memory == {}


def test_a_shorter_collection_is_found_out(tmp_path):
    tuner = make()
    tuner.fit(split_list(), split_list(), 2)
    tuner.save(tmp_path / "run.pt")
    other = make()
    other.load(tmp_path / "run.pt")
    with pytest.raises(br.Error, match="6 batches into a round; got one of 2"):
        other.fit(split_list()[:2], split_list(), 1)


def test_a_scheduler_that_wants_a_metric_is_saved(tmp_path):
    tuner = make()
    tuner.hyper_scheduler = ReduceLROnPlateau(tuner.hyper_optimizer, patience=0)
    tuner.fit(split_list(), split_list(), 3)
    tuner.save(tmp_path / "run.pt")
    other = make()
    other.hyper_scheduler = ReduceLROnPlateau(other.hyper_optimizer, patience=0)
    other.load(tmp_path / "run.pt")
    assert other.hyper_scheduler.best == tuner.hyper_scheduler.best


@pytest.mark.parametrize("name", ["Adafactor", "SparseAdam", "Adagrad", "RMSprop", "AdamW"])
def test_runs_of_every_optimiser_continue(name, tmp_path):
    def made():
        torch.manual_seed(0)
        x, y = torch.randn(12, 3), torch.randn(12, 1)
        model = nn.Linear(3, 1)
        weights = br.hyperparameters.Weights(12, sparse=name == "SparseAdam")
        loss = lambda m, h, b: (h(torch.arange(12)) * (m(b[0]) - b[1]).square()[:, 0]).mean()  # noqa: E731
        val = lambda m, h, b: (m(b[0]) - b[1]).abs().mean()  # noqa: E731
        problem = br.Problem(model, weights, loss, val)
        hyper = getattr(torch.optim, name)(weights.parameters(), 0.1)
        method = br.Implicit(br.ConjugateGradient(5, damping=0.1))
        return br.Tuner(problem, torch.optim.SGD(model.parameters(), 0.05), hyper, method), [(x, y)]

    whole, batches = made()
    whole.fit(batches, batches, 5)
    first, batches = made()
    first.fit(batches, batches, 2)
    first.save(tmp_path / "run.pt")
    second, batches = made()
    second.load(tmp_path / "run.pt")
    second.fit(batches, batches, 3)
    assert torch.equal(second.problem.hyper.table, whole.problem.hyper.table)
