"""Callbacks that log the history to other libraries and to CSV files."""

import csv
import sys

import pytest
import torch

import bestresponse as br
import loops
from bestresponse import callbacks

TRAIN, VAL = map(loops.batches, loops.data(torch.float64))


def run(*loggers, steps=3, resume=None):
    """A short run with loggers, whose state is saved after the second hyper-step."""
    one = loops.problem(loops.network(torch.float64))
    tuner = br.Tuner(
        one,
        torch.optim.SGD(one.weights.values(), 0.1),
        torch.optim.Adam(one.hyperparameters.values(), 0.05),
        br.Implicit(br.Neumann(2, 0.1)),
        callbacks=loggers,
    )
    if resume is not None:
        tuner.load(resume)
    tuner.fit(TRAIN, VAL, steps)
    return tuner


def lines(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_line_for_each_hyper_step_and_new_columns(tmp_path):
    path = tmp_path / "folder" / "log.csv"

    def late(tuner):
        if tuner.hyper_step == 3:
            tuner.history[-1]["test_loss"] = 0.25

    tuner = run(late, callbacks.CSV(path))
    found = lines(path)
    assert [row["hyper_step"] for row in found] == ["1", "2", "3"]
    assert [row["test_loss"] for row in found] == ["", "", "0.25"]
    assert [float(row["val_loss"]) for row in found] == pytest.approx([r["val_loss"] for r in tuner.history])
    assert float(found[2]["hyperparameters/decay.0.weight/median"]) > 0
    assert "status" not in found[0]


def test_csv_of_a_resumed_run_has_each_hyper_step_once(tmp_path):
    path = tmp_path / "log.csv"
    tuner = run(callbacks.CSV(path), steps=2)
    tuner.save(tmp_path / "run.pt")
    tuner.fit(TRAIN, VAL, 2)
    path.write_text(path.read_text() + "5,0.1")  # the run was killed while it wrote
    whole = lines(path)[:4]
    run(callbacks.CSV(path), resume=tmp_path / "run.pt", steps=2)
    again = lines(path)
    assert [row["hyper_step"] for row in again] == ["1", "2", "3", "4"]
    assert [row["val_loss"] for row in again] == [row["val_loss"] for row in whole]
    run(callbacks.CSV(path), steps=1)
    assert len(lines(path)) == 1


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda: callbacks.TensorBoard("x"), "tensorboard"),
        (lambda: callbacks.WandB(), "wandb"),
        (lambda: callbacks.MLflow(), "mlflow"),
        (lambda: callbacks.Trackio("x"), "trackio"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(make, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(br.Error, match=f"pip install 'bestresponse\\[{package}\\]'"):
        make()


# --- with the real libraries ---------------------------------------------------------------------

slow = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def resumed(make, tmp_path):
    """A run that was interrupted after a save, and continues in a new process, as it were."""
    first = run(make(), steps=2)
    first.save(tmp_path / "run.pt")
    run(make(), resume=tmp_path / "run.pt", steps=1)
    return first


class TestTensorBoard:
    pytestmark = slow

    def test_scalars(self, tmp_path):
        pytest.importorskip("tensorboard", reason="needs tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        first = resumed(lambda: callbacks.TensorBoard(tmp_path / "log"), tmp_path)
        found = EventAccumulator(str(tmp_path / "log"))
        found.Reload()
        events = found.Scalars("val_loss")
        assert [event.step for event in events] == [1, 2, 3]
        assert events[1].value == pytest.approx(first.history[1]["val_loss"])
        assert "hyperparameters/decay.0.weight/median" in found.Tags()["scalars"]


class TestWandB:
    pytestmark = slow

    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch, tmp_path):
        pytest.importorskip("wandb", reason="needs wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        monkeypatch.setenv("WANDB_DIR", str(tmp_path))

    def test_an_offline_run(self, tmp_path):
        made = callbacks.WandB(project="decays")
        seen = []
        tuner = run(made, lambda t: seen.append(dict(made.run.summary)), steps=2)
        assert [row["val_loss"] for row in seen] == pytest.approx([row["val_loss"] for row in tuner.history])
        assert [row["hyper_step"] for row in seen] == [1, 2]
        assert seen[0]["hyperparameters/decay.0.weight/median"] > 0
        assert made.run.config["method"].startswith("Implicit(")
        assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
        again = callbacks.WandB(project="decays")
        again.load_state_dict(made.state_dict())
        run(again, steps=1)
        assert again.run.id == made.run.id

    def test_an_active_run_stays_open(self):
        import wandb

        with wandb.init(project="decays") as active:
            made = callbacks.WandB()
            run(made, steps=1)
            assert made.run is active
            active.log({"mine": 1.0})


class TestMLflow:
    pytestmark = slow

    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("mlflow", reason="needs mlflow")

    def test_a_run(self, tmp_path):
        from mlflow import MlflowClient

        place = f"sqlite:///{tmp_path}/mlflow.db"
        first = resumed(lambda: callbacks.MLflow(place, "decays", "first"), tmp_path)
        client = MlflowClient(place)
        (found,) = client.search_runs([client.get_experiment_by_name("decays").experiment_id])
        values = client.get_metric_history(found.info.run_id, "val_loss")
        assert sorted(value.step for value in values) == [1, 2, 3]
        assert values[1].value == pytest.approx(first.history[1]["val_loss"])
        assert found.info.status == "FINISHED"
        assert found.data.params["hyper_optimizer"] == "Adam"
        assert "hyperparameters/decay.0.weight/median" in found.data.metrics

    def test_an_active_run_stays_open(self, tmp_path):
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
        with mlflow.start_run() as active:
            run(callbacks.MLflow(), steps=1)
            assert mlflow.active_run().info.run_id == active.info.run_id
        assert "val_loss" in mlflow.get_run(active.info.run_id).data.metrics


class TestTrackio:
    pytestmark = slow

    def test_a_run(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
        pytest.importorskip("trackio", reason="needs trackio")
        made = [callbacks.Trackio("decays", name="first") for _ in range(2)]
        again = iter(made)
        first = resumed(lambda: next(again), tmp_path)
        from trackio.sqlite_storage import SQLiteStorage

        assert SQLiteStorage.get_runs("decays") == ["first"]
        logged = SQLiteStorage.get_logs("decays", "first")
        assert [row["step"] for row in logged] == [1, 2, 3]
        assert logged[1]["val_loss"] == pytest.approx(first.history[1]["val_loss"])
