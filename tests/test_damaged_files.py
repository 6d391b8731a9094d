"""Damaged and foreign files are refused, and nothing has changed; full disks and protected files."""

import errno
import json
import os
import random
import stat
import subprocess
import sys
import tempfile
import zipfile
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bestresponse as br
from bestresponse import _files as files
from bestresponse.runs import callbacks
from bestresponse.runs.events import events
from bestresponse.runs.state import state_of

BATCH = torch.linspace(-1, 1, 80).double().sin().view(20, 4), torch.arange(20) % 3


def make(more=(), scheduler=False, **arguments):
    torch.manual_seed(0)
    net, hyper = nn.Linear(4, 3), nn.ParameterDict({"l": nn.Parameter(torch.zeros(()))})
    problem = br.Problem(
        net,
        hyper,
        lambda m, h, b: F.cross_entropy(m(b[0]), b[1]) + h["l"].exp() * m.weight.square().sum(),
        lambda m, h, b: F.cross_entropy(m(b[0]), b[1]),
        verify=False,
    )
    weights, hyper = torch.optim.Adam(net.parameters(), 0.1), torch.optim.SGD(hyper.parameters(), 0.1)
    if scheduler:
        arguments["weight_scheduler"] = torch.optim.lr_scheduler.StepLR(weights, 5)
    return br.Tuner(problem, weights, hyper, callbacks=more, **arguments)


def state(tuner):
    def flat(x):
        if isinstance(x, torch.Tensor):
            return x.tolist()
        if isinstance(x, dict):
            return [(str(k), flat(v)) for k, v in x.items()]
        return [flat(v) for v in x] if isinstance(x, list | tuple) else repr(x)

    own = [c.state_dict() for c in tuner.callbacks if hasattr(c, "state_dict")]
    numbers = [tuner.history, tuner.hyper_step, tuner.weight_step, tuner.resumed, list(tuner.streams), own]
    return repr(flat([state_of(tuner), numbers]))


@cache
def content_of_a_run():
    tuner = make([callbacks.KeepBest()], scheduler=True)
    tuner.fit([BATCH], [BATCH], 2)
    with tempfile.TemporaryDirectory() as folder:
        tuner.save(Path(folder) / "run.pt")
        return (Path(folder) / "run.pt").read_bytes()


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "run.pt"
    path.write_bytes(content_of_a_run())
    return path


def refused(path, words=".", more=None, scheduler=True):
    """The error of a load, after which the tuner is as before and can run."""
    tuner = make([callbacks.KeepBest()] if more is None else more, scheduler=scheduler)
    before = state(tuner)
    with pytest.raises(br.Error, match=words) as caught:
        tuner.load(path)
    assert state(tuner) == before
    return str(caught.value)


def test_flipped_bits_are_found(saved):
    """Any 40 of the bits; none of them loads as another state."""
    raw, rng = saved.read_bytes(), random.Random(1)
    whole = make([callbacks.KeepBest()], scheduler=True)
    whole.load(saved)
    tuner = make([callbacks.KeepBest()], scheduler=True)
    for place in rng.sample(range(len(raw)), 40):
        broken = bytearray(raw)
        broken[place] ^= 1 << rng.randrange(8)
        saved.write_bytes(broken)
        before = state(tuner)
        try:
            tuner.load(saved)
        except br.Error:
            assert state(tuner) == before
        else:  # between the parts of the file
            assert state(tuner) == state(whole)


def test_files_that_are_cut_or_have_zeros_are_refused(saved):
    raw = saved.read_bytes()
    for length in (0, 1, 100, len(raw) // 2, len(raw) - 1):
        saved.write_bytes(raw[:length])
        refused(saved, "which cannot be read, since it is damaged or of another kind")
    for place in range(0, len(raw) - 512, len(raw) // 8):
        saved.write_bytes(raw[:place] + bytes(512) + raw[place + 512 :])
        refused(saved, "cannot be read")
    saved.write_bytes(raw + raw)  # written twice: torch and zipfile would read the last one
    tuner = make([callbacks.KeepBest()], scheduler=True)
    try:
        tuner.load(saved)
    except br.Error:
        pass
    else:
        assert tuner.hyper_step == 2


def test_checksums_are_written_even_if_they_are_turned_off(saved):
    torch.serialization.set_crc32_options(False)
    try:
        make().save(saved)
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    assert all(part.CRC for part in zipfile.ZipFile(saved).infolist() if part.file_size)
    make().load(saved)


def put(place, value):
    """A change of one entry of a saved run."""

    def change(content):
        *way, last = place
        for key in way:
            content = content[key]
        if value is DELETE:
            del content[last]
        else:
            content[last] = value(content[last]) if callable(value) else value

    return change


DELETE = object()
OPTIMIZER = ("parts", "weight_optimizer", 1)
CHANGES = {
    "another format": put(["bestresponse"], 2),
    "no part": put(["modules"], DELETE),
    "parts that are a list": put(["parts"], [1]),
    "no hyper": put(["modules", "hyper"], DELETE),
    "a tensor of another shape": put(["modules", "model", "state", "weight"], torch.zeros(3, 5)),
    "a tensor of another type": put(["modules", "model", "state", "weight"], torch.zeros(3, 4).half()),
    "a tensor without values": put(["modules", "model", "state", "weight"], torch.zeros(3, 4, device="meta")),
    "a sparse tensor": put(["modules", "model", "state", "weight"], torch.zeros(3, 4).to_sparse()),
    "no tensor": put(["modules", "model", "state", "bias"], [0.0, 0.0, 0.0]),
    "an unknown tensor": put(["modules", "model", "state", "more"], torch.zeros(())),
    "buffers that are texts": put(["modules", "model", "buffers"], {"x": "y"}),
    "another optimiser": put(["parts", "weight_optimizer", 0], "SGD"),
    "an optimiser that is a number": put(["parts", "weight_optimizer"], 5),
    "no state of an optimiser": put([*OPTIMIZER], [1, 2]),
    "an optimiser without groups": put([*OPTIMIZER, "param_groups"], []),
    "a group that is a text": put([*OPTIMIZER, "param_groups"], ["x"]),
    "other parameters": put([*OPTIMIZER, "param_groups", 0, "params"], [0]),
    "parameters in another order": put([*OPTIMIZER, "param_groups", 0, "params"], [1, 0]),
    "no rate": put([*OPTIMIZER, "param_groups", 0, "lr"], DELETE),
    "a rate that is a text": put([*OPTIMIZER, "param_groups", 0, "lr"], "0.1"),
    "moments of another shape": put([*OPTIMIZER, "state", 0, "exp_avg"], torch.zeros(2, 2)),
    "moments that are a text": put([*OPTIMIZER, "state", 0], "x"),
    "a moment that is missing": put([*OPTIMIZER, "state", 0, "exp_avg"], DELETE),
    "moments of unknown weights": put([*OPTIMIZER, "state", 7], {}),
    "a scheduler's state of another kind": put(["parts", "weight_scheduler", 1, "last_epoch"], "x"),
    "a scheduler's state that is a list": put(["parts", "weight_scheduler", 1], [3]),
    "settings of the method": put(["method", "settings"], 5),
    "states of the method": put(["method", "states"], None),
    "an unknown state of the method": put(["method", "states", "method", "more"], 1),
    "a solution that is a list": put(["method", "states", "method", "solution"], [1]),
    "a memory that is a text": put(["method", "states", "method", "memory"], "x"),
    "callbacks": put(["callbacks"], {"a": 1}),
    "a callback's state": put(["callbacks", 0, 1], 5),
    "a callback's best row": put(["callbacks", 0, 1, "row"], "x"),
    "a step that is a text": put(["progress", "hyper_step"], "2"),
    "a step that is true": put(["progress", "hyper_step"], True),
    "a step below zero": put(["progress", "weight_step"], -1),
    "a history that is a number": put(["progress", "history"], 3),
    "a row that is a number": put(["progress", "history", 1], 3),
    "a row without seconds": put(["progress", "history", 1, "seconds"], DELETE),
    "settings": put(["settings"], [1]),
    "a setting that is a tensor": put(["settings", "clip_weights"], torch.ones(2)),
    "streams": put(["streams"], None),
    "a stream that is a number": put(["streams", "train_batches"], 3),
    "a stream without an opening": put(["streams", "train_batches", "opening"], DELETE),
    "a number of batches below zero": put(["streams", "train_batches", "taken"], -1),
    "random": put(["random"], DELETE),
    "a random state that is short": put(["random", 0], ("torch", torch.zeros(3, dtype=torch.uint8))),
    "a random state of another type": put(["random", 0], ("torch", "x")),
    "Python's random state": put(["random", 1], ("random", (3, (1, 2), None))),
    "NumPy's random state": put(["random", 2], ("numpy", ("MT19937", 3))),
    "a random state without a name": put(["random", 0], 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_of_another_form_is_refused_before_anything_changes(saved, name):
    content = torch.load(saved, weights_only=True)
    CHANGES[name](content)
    torch.save(content, saved)
    refused(saved)


def test_groups_with_other_states_are_restored(tmp_path):
    def one():
        tuner = make()
        weight, bias = tuner.problem.weights.values()
        groups = [{"params": [weight], "amsgrad": True}, {"params": [bias]}]
        tuner.weight_optimizer = torch.optim.Adam(groups, 0.1)
        return tuner

    tuner = one()
    tuner.fit([BATCH], [BATCH], 1)
    tuner.save(tmp_path / "run.pt")
    other = one()
    other.load(tmp_path / "run.pt")
    assert (
        other.weight_optimizer.state_dict()["state"][0].keys()
        > other.weight_optimizer.state_dict()["state"][1].keys()
    )


def test_files_of_other_libraries_are_refused(tmp_path):
    path = tmp_path / "other.pt"
    net = nn.Linear(4, 3)
    for content in (net.state_dict(), net, [1], None, torch.zeros(3), {"bestresponse": 3}, {3: 3}):
        torch.save(content, path)
        refused(path, "Tuner.load needs a file written by Tuner.save")
    torch.save(net.state_dict(), path, _use_new_zipfile_serialization=False)
    refused(path, "of another kind")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("hello", "hello")
    refused(path, "of another kind")
    for place in ("a\0b", "", tmp_path):
        refused(place, "which does not exist")


class Fails:
    """A callback whose state cannot be loaded a first time."""

    def __init__(self, error):
        self.errors, self.rows = [error] * (error is not None), ["own"]

    def __call__(self, tuner):
        self.rows.append(tuner.hyper_step)

    def state_dict(self):
        return {"rows": list(self.rows)}

    def load_state_dict(self, state):
        self.rows.clear()
        self.rows += state["rows"]
        if self.errors:
            raise self.errors.pop()


@pytest.mark.parametrize("error", [ZeroDivisionError("zero"), KeyboardInterrupt()])
def test_a_load_that_fails_late_changes_nothing(tmp_path, error):
    path = tmp_path / "run.pt"
    tuner = make([callbacks.KeepBest(), Fails(None)])
    tuner.fit([BATCH], [BATCH], 3)
    tuner.save(path)
    other = make([callbacks.KeepBest(), Fails(error)])
    other.fit([BATCH], [BATCH], 1)
    before = state(other)
    with pytest.raises(br.Error if isinstance(error, Exception) else KeyboardInterrupt) as caught:
        other.load(path)
    assert state(other) == before
    if isinstance(error, Exception):
        assert "changed nothing" in str(caught.value)
    other.load(path)
    assert other.hyper_step == 3
    assert other.callbacks[1].rows == ["own", 1, 2, 3]


def test_the_previous_file_is_loaded_if_the_last_one_is_damaged(tmp_path):
    path = tmp_path / "run.pt"
    make([callbacks.Checkpoint(path, keep=2)]).fit([BATCH], [BATCH], 3)
    assert sorted(os.listdir(tmp_path)) == ["run.pt", "run.pt.previous"]
    whole = path.read_bytes()
    for damage in (lambda: path.write_bytes(whole[:-9]), path.unlink):
        damage()
        tuner = make()
        with pytest.warns(
            br.BestResponseWarning, match="The file before it is loaded, 'run.pt.previous', from hyper"
        ):
            tuner.load(path)
        assert tuner.hyper_step == 2
    path.write_bytes(whole)
    tuner.load(path)  # without a warning
    assert tuner.hyper_step == 3
    for file in (path, path.with_name("run.pt.previous")):
        file.write_bytes(b"x")
    refused(path, r"run\.pt', which cannot be read", more=[])
    with pytest.raises(br.Error, match="keep must be 1 or 2; got 3"):
        callbacks.Checkpoint(path, keep=3)


def test_both_files_are_kept_without_links(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "run.pt"
    make([callbacks.Checkpoint(path, keep=2)]).fit([BATCH], [BATCH], 2)
    tuner = make()
    path.unlink()
    with pytest.warns(br.BestResponseWarning, match="hyper-step 1"):
        tuner.load(path)


# --- writing ---------------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch):
    """A disk that is full from the moment the test says so."""
    room = {"left": None}
    opened = files.Path.open

    def opening(self, mode="r", *args, **more):
        file = opened(self, mode, *args, **more)
        return Limited(file, room) if set(mode) & set("wa") else file

    monkeypatch.setattr(files.Path, "open", opening)
    return room


class Limited:
    """A file on a disk with so many bytes left."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        left = self.room["left"]
        if left is not None and len(data) > left:
            self.file.write(bytes(memoryview(data)[:left]) if not isinstance(data, str) else data[:left])
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.file.close()


def test_a_full_disk_leaves_the_old_file_whole(saved, full):
    before = saved.read_bytes()
    for left in (0, 10, 1000):
        full["left"] = left
        with pytest.raises(
            br.Error, match="a path of a file that can be written; got .*: No space left on device"
        ):
            make().save(saved)
        assert saved.read_bytes() == before
        assert os.listdir(saved.parent) == ["run.pt"]


def test_a_run_continues_on_a_full_disk_and_writes_its_rows_later(tmp_path, full):
    path, rows = tmp_path / "run.pt", tmp_path / "rows.jsonl"

    def disk(tuner):
        full["left"] = 20 if tuner.hyper_step in (2, 3) else None

    tuner = make([disk, callbacks.JSONLines(rows), callbacks.Checkpoint(path)])
    with pytest.warns(br.BestResponseWarning, match="No space left on device.*The run continues") as caught:
        tuner.fit([BATCH], [BATCH], 5)
    assert len(caught) == 2  # one for each file
    assert [json.loads(line)["hyper_step"] for line in rows.read_text().splitlines()] == [1, 2, 3, 4, 5]
    table = events(tuner.history)
    assert [row["event"] for row in table] == ["row not written", "checkpoint not written"]
    assert all((row["times"], row["first"], row["last"]) == (2, 2, 3) for row in table)
    assert "No space left on device" in tuner.history[1]["event"]
    other = make([callbacks.JSONLines(rows)])
    other.load(path)
    assert other.hyper_step == 5


@pytest.mark.parametrize("kind", [callbacks.JSONLines, callbacks.Checkpoint])
def test_the_policy_raise_ends_the_run_on_a_full_disk(tmp_path, full, kind):
    full["left"] = 0
    tuner = make([kind(tmp_path / "file")], policy="raise")
    with pytest.raises(br.Error, match="No space left on device"):
        tuner.fit([BATCH], [BATCH], 2)
    full["left"] = None
    tuner.fit([BATCH], [BATCH], 1)
    assert (tmp_path / "file").stat().st_size > 100


def test_files_that_are_protected_stay(saved, tmp_path):
    before = saved.read_bytes()
    saved.chmod(0o444)
    with pytest.raises(br.Error, match="the file is read-only"):
        make().save(saved)
    assert saved.read_bytes() == before
    for place, words in ((tmp_path, "Is a directory"), ("/dev/null", "Not a regular file"), ("a\0b", "null")):
        with pytest.raises(br.Error, match=words):
            make().save(place)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_links_and_modes_are_kept(tmp_path):
    for name in ("run.pt", "rows.jsonl"):
        (tmp_path / "store").mkdir(exist_ok=True)
        target = tmp_path / "store" / name
        target.write_bytes(b'{"hyper_step": 1}')
        target.chmod(0o640)
        (tmp_path / name).symlink_to(target)
    lines, saving = (
        callbacks.JSONLines(tmp_path / "rows.jsonl"),
        callbacks.Checkpoint(tmp_path / "run.pt", keep=2),
    )
    with pytest.warns(br.BestResponseWarning, match="ended with 1 rows of a run"):
        make([lines, saving]).fit([BATCH], [BATCH], 1)
    for name in ("run.pt", "rows.jsonl"):
        assert (tmp_path / name).is_symlink()
        assert stat.S_IMODE((tmp_path / "store" / name).stat().st_mode) == 0o640
        assert (tmp_path / "store" / name).stat().st_size > 100
        assert (tmp_path / "store" / f"{name}.previous").read_bytes() == b'{"hyper_step": 1}'


def steps_in(path):
    return [json.loads(line)["hyper_step"] for line in path.read_text().splitlines()]


def interrupt_at(number):
    def interrupt(tuner):
        if tuner.hyper_step == number:
            raise KeyboardInterrupt

    return interrupt


def test_a_run_that_was_interrupted_before_its_first_save_does_not_write_its_rows_twice(tmp_path):
    path = tmp_path / "rows.jsonl"
    log = callbacks.JSONLines(path)
    make([log]).fit([BATCH], [BATCH], 2)
    make([callbacks.JSONLines(path)]).fit([BATCH], [BATCH], 2)  # runs that end are appended
    assert steps_in(path) == [1, 2, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        make([log, interrupt_at(3)]).fit([BATCH], [BATCH], 9)
    with path.open("a") as file:
        file.write('\n{"hyper_step": 4, "tr')
    earlier = path.read_bytes()
    with pytest.warns(br.BestResponseWarning, match="ended with 4 rows of a run .* The old file is kept as"):
        make([callbacks.JSONLines(path)]).fit([BATCH], [BATCH], 3)
    assert steps_in(path) == [1, 2, 1, 2, 1, 2, 3]
    assert path.with_name("rows.jsonl.previous").read_bytes() == earlier
    assert path.read_bytes().endswith(b"}\n")


def test_a_run_that_is_interrupted_and_goes_on_has_each_row_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    tuner = make([callbacks.JSONLines(path), interrupt_at(3)])
    with pytest.raises(KeyboardInterrupt):
        tuner.fit([BATCH], [BATCH], 9)
    tuner.fit([BATCH], [BATCH], 2)
    assert steps_in(path) == [1, 2, 3, 4, 5]
    other = make([callbacks.JSONLines(path)])
    other.history, other.hyper_step = list(tuner.history), 5
    other.fit([BATCH], [BATCH], 1)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]
    assert b"\n\n" not in path.read_bytes()


def test_a_figure_that_cannot_be_written_leaves_the_old_one(tmp_path, full):
    plots = pytest.importorskip("bestresponse.experiments.plots")
    path = tmp_path / "figure.png"
    path.write_bytes(b"old")
    full["left"] = 100
    with (
        pytest.raises(br.Error, match="figure.png': No space left on device"),
        plots.panels(path) as ((axes,),),
    ):
        axes.plot([1, 2])
    assert path.read_bytes() == b"old"
    full["left"] = None
    with plots.panels(path) as ((axes,),):
        axes.plot([1, 2])
    assert path.read_bytes()[1:4] == b"PNG"


def test_a_state_is_not_changed_by_looking_at_it():
    tuner = make()
    tuner.fit([BATCH], [BATCH], 1)
    before = deepcopy(state_of(tuner))
    assert repr(state_of(tuner)) == repr(before)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the runs are forked")
def test_killed_runs_go_on_bit_for_bit(tmp_path):
    script = Path(__file__).with_name("killed_runs.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(random.randrange(10**6))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] >= 40
    assert counts["in writes"] >= 10
