"""Callbacks that give the numbers of each hyper-step to a library for logs, or to a CSV file."""

import csv
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import require_package
from ..memory import settings_of
from .run import Run
from .summary import flat_numbers


class Logger(ABC):
    """What the loggers share: open at the first hyper-step, log each, close when the run ends.

    Names are those of the history; the summary of the hyperparameters becomes ``hyperparameters/NAME`` and so on. The
    step is the number of the hyper-step. A run that continues from a saved state continues its log.
    """

    _open = False
    _resumed: dict[str, Any] | None = None

    def __call__(self, tuner: Run) -> None:
        if tuner.problem.group.rank:  # of several processes rank 0 logs
            return
        if not self._open:
            self.open(tuner)
            self._open = True
        self.log(tuner.hyper_step, flat_numbers(tuner.history[-1]))

    @abstractmethod
    def open(self, tuner: Run) -> None:
        """Begin the log, or continue that of ``_resumed``, a `state_dict`."""

    @abstractmethod
    def log(self, step: int, numbers: dict[str, float]) -> None:
        """Log the numbers of a hyper-step."""

    @abstractmethod
    def finish(self) -> None:
        """End the log; the next hyper-step opens it again."""

    def close(self) -> None:
        """End the log, if it is open."""
        if self._open:
            self._resumed = self.state_dict()
            self.finish()
            self._open = False

    def state_dict(self) -> dict[str, Any]:
        """Which log it is."""
        return dict(self._resumed or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue that log at the next hyper-step."""
        self.close()
        self._resumed = dict(state)


class TensorBoard(Logger):
    """Log to TensorBoard.

    Args:
        folder: the folder of the log, as TensorBoard's ``--logdir``.

    Raises:
        MissingPackageError: tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        require_package("tensorboard", "callbacks.TensorBoard", "tensorboard")
        self.folder = Path(folder)
        self._writer: Any = None

    def open(self, tuner: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard ignores what an interrupted run logged from this step on.
        purge = tuner.hyper_step if self._resumed is not None else None
        self._writer = SummaryWriter(str(self.folder), purge_step=purge)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self._writer.close()


class WandB(Logger):
    """Log to Weights & Biases.

    Args:
        settings: the arguments of ``wandb.init``, such as ``project="decays"`` or ``mode="offline"``. If a run of
            W&B is active, the callback logs to that one, and leaves it open.

    Raises:
        MissingPackageError: wandb is not installed.
    """

    def __init__(self, **settings: Any) -> None:
        require_package("wandb", "callbacks.WandB", "wandb")
        self.settings = settings
        self.run: Any = None
        self._own = False
        self._names: set[str] = set()

    def open(self, tuner: Run) -> None:
        import wandb

        self._own = wandb.run is None
        earlier = {"id": self._resumed["id"], "resume": "allow"} if self._resumed else {}
        self.run = wandb.run or wandb.init(**{"config": _config(tuner), **earlier, **self.settings})
        self._names = set()

    def log(self, step: int, numbers: dict[str, float]) -> None:
        # W&B's own step counts every call, and may belong to the rest of an active run.
        for name in numbers.keys() - self._names - {"hyper_step"}:
            self.run.define_metric(name, step_metric="hyper_step")
        self._names |= numbers.keys()
        self.run.log(numbers)

    def finish(self) -> None:
        if self._own:
            self.run.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.run.id} if self.run is not None else super().state_dict()


class MLflow(Logger):
    """Log to MLflow.

    Args:
        tracking_uri: where MLflow stores runs; None means MLflow's own setting.
        experiment: the name of the experiment; None means MLflow's default.
        run_name: the name of the run. If a run of MLflow is active and none of these is given, the callback logs to
            that one, and leaves it open.

    Raises:
        MissingPackageError: mlflow is not installed.
    """

    def __init__(
        self, tracking_uri: str | None = None, experiment: str | None = None, run_name: str | None = None
    ) -> None:
        require_package("mlflow", "callbacks.MLflow", "mlflow")
        self.tracking_uri, self.experiment, self.run_name = tracking_uri, experiment, run_name
        self.run_id: str | None = None
        self._client: Any = None
        self._own = False

    def open(self, tuner: Run) -> None:
        from mlflow import MlflowClient, active_run

        self._client = MlflowClient(self.tracking_uri)
        given = self.tracking_uri or self.experiment or self.run_name
        active = None if given else active_run()
        self._own = active is None
        self.run_id = self._resumed["id"] if self._resumed else None
        if active is not None:
            self.run_id = active.info.run_id
        elif self.run_id is None:
            self.run_id = self._client.create_run(self._experiment_id(), run_name=self.run_name).info.run_id
            for name, value in _config(tuner).items():
                self._client.log_param(self.run_id, name, value)
        else:
            self._client.update_run(self.run_id, status="RUNNING")

    def _experiment_id(self) -> str:
        name = "Default" if self.experiment is None else self.experiment
        found = self._client.get_experiment_by_name(name)
        experiment: str = self._client.create_experiment(name) if found is None else found.experiment_id
        return experiment

    def log(self, step: int, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = iter([Metric(_mlflow_name(name), value, now, step) for name, value in numbers.items()])
        while batch := list(itertools.islice(metrics, 1000)):  # the most that a call may log
            self._client.log_batch(self.run_id, batch)

    def finish(self) -> None:
        if self._own:
            self._client.set_terminated(self.run_id)

    def state_dict(self) -> dict[str, Any]:
        return {"id": self.run_id} if self.run_id is not None else super().state_dict()


class Trackio(Logger):
    """Log to trackio.

    Args:
        project: the name of the project.
        settings: other arguments of ``trackio.init``, such as ``name="first"``.

    Raises:
        MissingPackageError: trackio is not installed.
    """

    def __init__(self, project: str, **settings: Any) -> None:
        require_package("trackio", "callbacks.Trackio", "trackio")
        self.project, self.settings = project, settings
        self.run: Any = None

    def open(self, tuner: Run) -> None:
        import trackio

        earlier = {"name": self._resumed["name"], "resume": "allow"} if self._resumed else {}
        self.run = trackio.init(self.project, **{"config": _config(tuner), **earlier, **self.settings})

    def log(self, step: int, numbers: dict[str, float]) -> None:
        self.run.log(numbers, step=step)

    def finish(self) -> None:
        self.run.finish()

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.run.name} if self.run is not None else super().state_dict()


class CSV(Logger):
    """Write the numbers of each hyper-step to a CSV file, a line for each.

    Args:
        path: the file. A run begins by removing lines of its next hyper-step and later ones: a new run empties the
            file, and one that continues from a saved state keeps the lines before. When a number comes for the first
            time, the file gets a new column.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._columns: list[str] = []

    def open(self, tuner: Run) -> None:
        rows: list[dict[str, str]] = []
        if self.path.exists():
            with self.path.open(encoding="utf-8", newline="") as file:
                rows = [row for row in csv.DictReader(file) if _before(row, tuner.hyper_step)]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        self._rewrite(rows)

    def log(self, step: int, numbers: dict[str, float]) -> None:
        new = [name for name in numbers if name not in self._columns]
        if new:
            with self.path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            self._rewrite(rows)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerow({k: f"{x:.9g}" for k, x in numbers.items()})

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        part = self.path.with_name(f".{self.path.name}.part")
        with part.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        part.replace(self.path)

    def finish(self) -> None:
        """Nothing is open between two lines."""


def _before(row: Mapping[str, Any], hyper_step: int) -> bool:
    """Whether a line of a CSV file is whole, and of an earlier hyper-step."""
    try:
        return None not in row and None not in row.values() and float(row["hyper_step"]) < hyper_step
    except (KeyError, ValueError):
        return False


def _config(tuner: Run) -> dict[str, str]:
    """The settings of a run, for its page."""
    parts = ("method", "weight_optimizer", "hyper_optimizer")
    found = {name: getattr(tuner, name, None) for name in parts}
    named = {n: settings_of(x) if n == "method" else type(x).__name__ for n, x in found.items()}
    return named | {"problem": repr(tuner.problem)}


def _mlflow_name(name: str) -> str:
    """A name of letters that MLflow allows."""
    return "".join(x if x.isalnum() or x in "_-. :/" else "_" for x in name)
