"""Reports: what they hold, from runs that ended, were killed, are empty or broken."""

import json
import math
import re
import shutil
import sys
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import bestresponse as br
from bestresponse import cli
from bestresponse.reports import Recorded, charts, write_report

pytest.importorskip("matplotlib")


def row(step, **more):
    return {
        "hyper_step": step,
        "weight_step": 5 * step,
        "train_loss": 1.0 / step,
        "val_loss": 2.0 / step,
        "hypergradient_norm": 0.1 / step,
        "status": "steps used",
        "products": 4,
        "residual": 0.3,
        "hypergradient_error": 0.5,
        "warm": step > 1,
        "stepped": True,
        "seconds": 0.5 * step,
        **more,
    }


def write(folder, rows, config=None, result=None, end=""):
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(each) + "\n" for each in rows)
    (folder / "metrics.jsonl").write_text(lines + end, encoding="utf-8")
    for name, value in (("config", config), ("result", result)):
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


class Reader(HTMLParser):
    """Checks that tags are closed in order, and collects the text and what the page loads."""

    ALONE = {"meta", "link", "img", "!doctype", "use", "path", "rect"}

    def __init__(self, text):
        super().__init__()
        self.open, self.words, self.loaded = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.loaded += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not v.startswith("#")]
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def report_of(folder, capsys=None):
    assert cli.main(["report", str(folder)]) == 0
    return read(folder / "report.html")


def read(path):
    reader = Reader(path.read_text(encoding="utf-8"))
    assert all(source.startswith("data:") for source in reader.loaded)
    return " ".join(reader.words)


def test_a_report_has_every_part_and_loads_nothing(tmp_path):
    quantiles = [-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]
    rows = [
        row(
            i,
            agreement=0.5,
            test_error=3.0,
            hyperparameters={"a": {"value": [0.1 * i]}, "b": {"quantiles": quantiles}},
            **({"watch_loss": 2.5, "watch_gap": 0.5} if i % 3 == 0 else {}),
        )
        for i in range(1, 13)
    ]
    rows[4] |= {"stepped": False, "status": "diverged", "event": "the disk was full"}
    rows[6] |= {"warm": False}
    result = {"headline": {"test error": 3.0}, "rows": [{"state": "last", "loss": 0.25}], "seconds": 61.0}
    config = {"steps": 12, "method": "Implicit()", "versions": {"torch": "2.13.0"}, "resumed_after": [8]}
    shown = report_of(write(tmp_path / "run", rows, config, result))
    for words in (
        "Losses and measurements",
        "watch loss, lowest",
        "Watch loss minus validation loss",
        "Norm of the hypergradient",
        "Agreement of two halves",
        "Accuracy of the solves",
        "Curvature products",
        "a over time",
        "b over time",
        "1 min 1 s",
        "Implicit()",
        "2.13.0",
        "steps used: 11, diverged: 1",
        "the disk was full",
        "test_error",
    ):
        assert words in shown
    assert re.search(r"skipped hyper-steps\s+1 \(5\)", shown)
    assert re.search(r"restarted from zero\s+1 \(7\)", shown)
    assert re.search(r"continued after hyper-steps\s+1 \(8\)", shown)
    assert "has not ended" not in shown


def test_a_killed_run_is_reported_up_to_its_last_whole_row(tmp_path):
    folder = write(tmp_path / "run", [row(1), row(2), row(3)], {"steps": 10}, end='{"hyper_step": 4, "tra')
    shown = report_of(folder)
    assert "has not ended, or was interrupted. 3 of 10 hyper-steps are here." in shown
    assert "1 line of metrics.jsonl is damaged" in shown


def test_numbers_that_are_not_finite(tmp_path):
    rows = [row(1), row(2, val_loss=None), row(3, val_loss=math.nan, residual=math.inf), row(4, damping=None)]
    shown = report_of(write(tmp_path / "run", rows))
    assert re.search(r"not finite\s+2 \(2, 3\)", shown)
    assert "validation: 0.5" in shown
    shown = report_of(write(tmp_path / "all", [row(1, train_loss=None, val_loss=None)]))
    assert re.search(r"not finite\s+1 \(1\)", shown)


def test_ten_thousand_rows_make_a_small_file_that_keeps_the_peaks(tmp_path):
    values = [math.sin(0.01 * i) + (50.0 if i == 4321 else 0.0) for i in range(10_000)]
    x, y = charts._thinned(list(range(10_000)), values)
    assert len(x) < 500
    assert max(y) > 49
    assert x == sorted(x)
    folder = write(tmp_path / "run", [row(i + 1, val_loss=value) for i, value in enumerate(values)])
    report_of(folder)
    assert (folder / "report.html").stat().st_size < 250_000


def test_gaps_in_a_line_stay_gaps():
    values = [math.nan if 3000 <= i < 4000 else 1.0 for i in range(10_000)]
    x, y = charts._thinned(list(range(10_000)), values)
    assert all(math.isnan(b) for a, b in zip(x, y, strict=True) if 3050 <= a < 3950)
    assert any(math.isnan(b) for b in y)


def test_what_is_no_run_is_refused(tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    only_config = write(tmp_path / "begun", [], {"steps": 3})
    for words, expected in (
        (["report", str(tmp_path / "nowhere")], "is no folder"),
        (["report", str(empty)], "there is none"),
        (["report", str(only_config)], "Has the run started?"),
        (["compare", str(only_config)], "2 to 8 runs; got 1"),
    ):
        assert cli.main(words) == 1
        assert expected in capsys.readouterr().err
    folder = write(tmp_path / "run", [row(1)])
    assert cli.main(["report", str(folder), "--out", str(folder / "metrics.jsonl" / "x.html")]) == 1
    assert "can be written" in capsys.readouterr().err


def test_texts_cannot_break_the_page(tmp_path):
    bad = '<script>alert("x")</script>'
    rows = [row(1, hyperparameters={bad: {"value": [1.0, 2.0]}}, **{bad: 3.0}), row(2)]
    folder = write(tmp_path / "run", rows, {"note": bad, bad: 1})
    shown = report_of(folder)
    assert bad in shown  # as text
    assert "<script" not in (folder / "report.html").read_text(encoding="utf-8")


def test_summaries_of_another_form_do_not_stop_a_report(tmp_path):
    odd = [
        4810,
        {"a": 3},
        {"a": {}},
        {"a": {"value": [None, 1.0]}},
        {"a": {"quantiles": []}},
        {"a": {"value": [1.0]}},
    ]
    rows = [row(i + 1, hyperparameters=each) for i, each in enumerate(odd)]
    assert "a over time" in report_of(write(tmp_path / "run", rows))
    rows = [
        row(1, hyperparameters={"a": {"quantiles": [1.0, 2.0]}}),
        row(2, hyperparameters={"a": {"quantiles": []}}),
    ]
    report_of(write(tmp_path / "run", rows))


def test_rows_of_several_runs_are_a_table_without_charts(tmp_path):
    rows = [row(1, seed=0), row(2, seed=0), row(1, seed=1)]
    shown = report_of(write(tmp_path / "run", rows, {"experiment": "inverse-error"}))
    assert "Losses" not in shown
    assert "the last 3 rows" in shown


def test_a_step_that_was_made_again_counts_once():
    run = Recorded("run", rows=[row(1), row(2), row(3), row(2, val_loss=7.0)])
    assert [each["hyper_step"] for each in run.history] == [1, 2, 3]
    assert run.series("val_loss") == ([1, 2, 3], [2.0, 7.0, 2.0 / 3])


def test_a_comparison_has_both_runs_and_what_differs(tmp_path, capsys):
    first = write(tmp_path / "a" / "run", [row(1), row(2)], {"lr": 0.1, "steps": 2}, {"seconds": 3.0})
    second = write(tmp_path / "b" / "run", [row(1, val_loss=9.0)], {"lr": 0.2, "steps": 2})
    out = tmp_path / "compare.html"
    assert cli.main(["compare", str(first), str(second), "--out", str(out)]) == 0
    shown = read(out)
    assert "run (1)" in shown
    assert re.search(r"lr\s+0.1\s+0.2", shown)
    assert not re.search(r"steps\s+2\s+2", shown)
    assert "Validation loss over time" in shown


# --- the callback -----------------------------------------------------------------------------------


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.images = nn.Parameter(torch.rand(3, 1, 8, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))


def tuner_of(*callbacks, fails_at=None):
    torch.manual_seed(0)
    model, hyper, y = nn.Sequential(nn.Flatten(), nn.Linear(64, 1)), Images(), torch.randn(3)

    def train(model, hyper, batch):
        return (model(hyper.images).squeeze(1) - hyper.scale * y).square().mean() + model[
            1
        ].weight.square().sum()

    def val(model, hyper, batch):
        if fails_at is not None and calls.append(1) is None and len(calls) >= fails_at:
            raise KeyboardInterrupt
        return (model(batch).squeeze(1) - y).square().mean()

    calls = []
    problem = br.Problem(model, hyper, train, val)
    optimizers = (torch.optim.SGD(ps.values(), 0.01) for ps in (problem.weights, problem.hyperparameters))
    return br.Tuner(problem, *optimizers, callbacks=callbacks)


def fit(tuner, steps=3):
    torch.manual_seed(1)
    return tuner.fit([None], [torch.rand(3, 1, 8, 8)], steps)


def test_the_callback_writes_histograms_and_images(tmp_path):
    path = tmp_path / "mine" / "report.html"
    fit(tuner_of(br.callbacks.Report(path, config={"data": "random"})))
    shown = read(path)
    assert "Run mine" in shown
    assert "images, all values" in shown
    assert "random" in shown
    assert "has not ended" not in shown
    text = path.read_text(encoding="utf-8")
    assert text.count('src="data:image/png') == 3
    data = json.loads((path.parent / "hyperparameters.json").read_text())
    assert sum(data["tensors"]["images"]["last"]["counts"]) == 3 * 64
    assert data["pictures"]["images"]["size"] == [8, 8, 1]


def test_the_files_of_a_run_give_the_report_of_the_callback(tmp_path):
    fit(
        tuner_of(
            br.callbacks.JSONLines(tmp_path / "metrics.jsonl"), br.callbacks.Report(tmp_path / "live.html")
        )
    )
    report_of(tmp_path)
    again = (tmp_path / "report.html").read_text(encoding="utf-8")
    live = (tmp_path / "live.html").read_text(encoding="utf-8")
    assert again.count("<figure") == live.count("<figure") > 6


def test_an_interrupted_run_leaves_a_report(tmp_path):
    path = tmp_path / "report.html"
    tuner = tuner_of(br.callbacks.Report(path), fails_at=5)
    with pytest.raises(KeyboardInterrupt):
        fit(tuner, 100)
    assert re.search(rf"has not ended, or was interrupted\. {len(tuner.history)} of 100 ", read(path))


def test_a_folder_that_cannot_be_written_ends_a_run_at_its_first_step_only(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(br.Error, match="needs a path of a file that can be written"):
        fit(tuner_of(br.callbacks.Report(tmp_path / "file" / "report.html")))

    def replace(tuner):
        if tuner.hyper_step == 2:
            shutil.rmtree(tmp_path / "run")
            (tmp_path / "run").touch()

    tuner = tuner_of(br.callbacks.Report(tmp_path / "run" / "report.html"), replace)
    with pytest.warns(br.BestResponseWarning, match="The run continues"):
        fit(tuner)
    assert len(tuner.history) == 3


def test_a_resumed_run_keeps_its_first_histograms(tmp_path):
    first = tuner_of(br.callbacks.Report(tmp_path / "report.html"))
    fit(first)
    first.save(tmp_path / "run.pt")
    data = json.loads((tmp_path / "hyperparameters.json").read_text())
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
    second = tuner_of(br.callbacks.Report(tmp_path / "x" / "report.html"))
    second.load(tmp_path / "run.pt")
    fit(second)
    later = json.loads((tmp_path / "x" / "hyperparameters.json").read_text())
    assert later["hyper_step"] == 6
    assert later["tensors"]["images"]["first"] == data["tensors"]["images"]["first"]
    assert later["tensors"]["images"]["last"] != data["tensors"]["images"]["last"]


def test_hyperparameters_without_numbers_to_draw(tmp_path):
    tuner = tuner_of(br.callbacks.Report(tmp_path / "report.html"))
    with torch.no_grad():
        tuner.problem.hyperparameters["images"].fill_(0.5)
    tuner.history.append(row(1))
    callback = tuner.callbacks[0]
    callback(tuner)
    with torch.no_grad():
        tuner.problem.hyperparameters["images"].fill_(math.nan)
    callback.close()
    assert "Pictures" in read(tmp_path / "report.html")


def test_the_order_of_a_report_is_the_same_each_time(tmp_path):
    run = Recorded("run", rows=[row(1), row(2)])
    write_report(run, tmp_path / "a.html")
    write_report(run, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_missing_matplotlib_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(br.Error, match=r"pip install 'bestresponse\[report\]'"):
        br.callbacks.Report(tmp_path / "report.html")
    assert cli.main(["report", str(write(tmp_path / "run", [row(1), row(2)]))]) == 1
    assert "bestresponse[report]" in capsys.readouterr().err


def test_a_report_and_its_rows_name_hyperparameters_alike(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(20, 1)
    decay = br.hyperparameters.WeightDecay(model, per="weight")
    with torch.no_grad():
        for parameter in decay.parameters():
            parameter.uniform_(-8, -2)

    def val(model, hyper, batch):
        return model(batch).square().mean()

    problem = br.Problem(model, decay, lambda m, h, b: val(m, h, b) + h(m), val)
    optimizers = (torch.optim.SGD(ps.values(), 0.1) for ps in (problem.weights, problem.hyperparameters))
    tuner = br.Tuner(problem, *optimizers, callbacks=[br.callbacks.Report(tmp_path / "report.html")])
    batches = [torch.randn(10, 20)]
    tuner.fit(batches, batches, 2)
    found = json.loads((tmp_path / "hyperparameters.json").read_text())["tensors"]["decay.weight"]["last"]
    quantiles = tuner.history[-1]["hyperparameters"]["decay.weight"]["quantiles"]
    assert [found["edges"][0], found["edges"][-1]] == pytest.approx([quantiles[0], quantiles[-1]])
    assert sum(found["counts"]) == 20
