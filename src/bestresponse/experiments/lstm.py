"""Dropout rates of an LSTM, tuned in seven ways for equally many epochs; and an overfitted text: section 5.5."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import bestresponse as br

from . import language, plots, runs, text
from .cells import Cell
from .experiment import Count, Number, Positive, Repeated, Row
from .language import Falling, LanguageModel, Regulariser
from .text import Corpus

RowName = Literal[
    "no tuning",
    "grid search",
    "random search",
    "Bayesian optimisation",
    "self-tuning network",
    "7 rates",
    "many rates",
]
_COLOURS = plots.colours(get_args(RowName))
_MARKS = {"grid search": "o", "random search": "s", "Bayesian optimisation": "^"}
_SAMPLERS = {"grid search": "grid", "random search": "random", "Bayesian optimisation": "gp"}
# Bayesian optimisation starts with random trials, which should differ from those of random search.
_SEED_OFFSETS = {"random": 0, "gp": 1_000_000}


class LSTM(Repeated):
    """Tune the dropout rates of an LSTM language model in seven ways, or overfit its validation text.

    Every row trains for the same number of epochs, and each trial of a search too; the best trial is the row of the
    search. The column of seconds shows what each row costs. If a run is stopped, the same command continues it and ends
    with the same numbers. With --overfit there is one run instead: it trains on ten sequences, and tunes a weight decay
    for each weight on ten others.
    """

    name = "lstm"
    cpu = "--data ptb --words 2000 --train-words 100000 --units 100 --length 35 --steps 1500 --trials 12"
    paper = (
        "--data ptb --words 0 --train-words 0 --units 650 --batch 40 --length 70 --steps 100000 --weight-rate 30 "
        "--hyper-rate 1e-3 --weight-steps 1 --terms 3 --trials 12"
    )
    labels = ("data", "kind")
    figures = ("lstm.png",)
    by, of = ("row", "hyperparameters"), ("validation perplexity", "test perplexity", "seconds")

    data: Literal["python", "ptb"] = "python"
    """The text: the help texts of Python, or the Penn TreeBank from --data-dir."""
    words: Number = 500  # The size of the vocabulary, which has the most frequent words; 0 takes all.
    train_words: Number = 20_000
    """Words of training text; validation and test each get an eighth as many. 0 takes all."""
    units: Count = 32  # Units of each of the two layers, and size of the embeddings.
    batch: Count = 20  # Parallel sequences in a batch.
    length: Count = 20  # Words in a sequence.
    steps: Count = 300  # Weight steps of each row, and of each trial of a search.
    rows: tuple[RowName, ...] = get_args(RowName)  # The rows of the table.
    weight_steps: Count = 10  # Weight steps before each hyper-step.
    weight_rate: Positive = 20.0
    """SGD's learning rate; it is divided by four when validation stops improving."""
    self_tuning_rate: Positive = 10.0
    """The same for the self-tuning network, whose training jumps at larger rates."""
    response_rate: Positive = 1.0  # SGD's learning rate for the response of the self-tuning network.
    clip: Positive = 0.25  # The largest norm of a gradient.
    hyper_rate: Positive = 0.05
    """Adam's learning rate for the logits of the rates and the logarithms of the penalties."""
    terms: Number = 0  # Neumann terms of the hypergradient; 0 is the identity (T1 − T2).
    initial_rate: float = 0.5  # The initial value of all dropout rates.
    trials: Count = 4
    """Trials of a search; a grid over two values takes the largest square below. The first ten trials of the Gaussian
    process are random."""
    save_every: Count = 20  # Hyper-steps between two saved states.
    overfit: bool = False
    """Overfit the validation text instead, on ten training and ten validation sequences of --length words. Of the other
    options, only --units, --steps, --weight-steps, --seed and --save-every apply."""

    @property
    def kind(self) -> str:
        """The kind of run, for the name of the folder."""
        return "overfit" if self.overfit else "rates"

    def tasks(self, device: torch.device, folder: Path) -> Sequence[Cell]:
        corpus = text.load(self.data, self.data_dir, self.words, self.train_words, device)
        make = partial(self._overfit if self.overfit else self._row, corpus)
        cells = []
        for seed in self.all_seeds():
            for name in ["overfit"] if self.overfit else self.rows:
                no_effect = [] if name in _SAMPLERS else ["trials"]
                if name != "self-tuning network":
                    no_effect += ["self_tuning_rate", "response_rate"]
                cells.append(Cell(self, name, seed, folder, make, no_effect))
        return cells

    def _problem(self, corpus: Corpus, seed: int, many: bool = False) -> br.Problem:
        torch.manual_seed(seed)
        rates = Regulariser(self.units, many, self.initial_rate, layers=2)
        model = LanguageModel(len(corpus.words), self.units, self.batch, rates=rates).to(corpus.train.device)
        return br.Problem(model, model.rates, language.train_loss, language.val_loss)

    def _row(self, corpus: Corpus, cell: Cell) -> Row:
        """Run one row: weights and rates together, or a search."""
        if cell.name in _SAMPLERS:
            return self._search(corpus, cell, _SAMPLERS[cell.name])
        problem = self._problem(corpus, cell.seed, many=cell.name == "many rates")
        if cell.name == "no tuning":
            return self._train(corpus, cell, problem, br.Direct(), 0.0)
        if cell.name == "self-tuning network":
            network = br.hypernetworks.SelfTuning(problem, 0.3)
            return self._train(corpus, cell, network.problem, br.Direct(), self.hyper_rate, network)
        method = br.Implicit(br.Neumann(self.terms, 0.1) if self.terms else br.Identity())
        return self._train(corpus, cell, problem, method, self.hyper_rate)

    def _train(
        self,
        corpus: Corpus,
        cell: Cell,
        problem: br.Problem,
        method: br.Method,
        hyper_rate: float,
        network: br.hypernetworks.SelfTuning | None = None,
    ) -> Row:
        """Train for all steps; return the row with the best validation perplexity."""
        streams = (corpus.train, corpus.val, corpus.test)
        train, val, test = (text.sequences(stream, self.batch, self.length) for stream in streams)
        source = problem if network is None else network.source
        model, frozen = source.model, hyper_rate == 0.0
        assert isinstance(model, LanguageModel)
        # Without tuning, a hyper-step changes nothing and comes once per epoch.
        weight_steps = (
            max(1, self.steps // max(1, round(self.steps / len(train)))) if frozen else self.weight_steps
        )

        def measure(*_: Any) -> dict[str, float]:
            if network is not None:
                network.write_()
            perplexities = (language.perplexity(model, batches) for batches in (val, test))
            return dict(zip(("val_perplexity", "test_perplexity"), perplexities, strict=True))

        after: list[Any] = [br.callbacks.Evaluate(measure, max(1, len(train) // weight_steps)), Falling()]
        weights = [{"params": list(problem.weights.values()), "lr": self.weight_rate}]
        if network is not None:
            after.insert(0, network.recentre)
            response = [*network.gates, *network.directions]
            weights = [
                {"params": list(network.base), "lr": self.self_tuning_rate},
                {"params": response, "lr": self.response_rate},
            ]
        tuner = br.Tuner(
            problem,
            torch.optim.SGD(weights),
            torch.optim.Adam(problem.hyperparameters.values(), hyper_rate),
            method,
            weight_steps=weight_steps,
            clip_weights=self.clip,
            seed=cell.seed,
            callbacks=after,
        )
        cell.fit(tuner, train, val, max(1, self.steps // weight_steps), 1 if frozen else self.save_every)
        rows = [row for row in tuner.history if "val_perplexity" in row]
        best = min(rows, key=lambda row: row["val_perplexity"])
        tuned = sum(p.numel() for p in source.hyperparameters.values())
        return {
            "hyperparameters": 0 if frozen else tuned,
            "validation perplexity": best["val_perplexity"],
            "test perplexity": best["test_perplexity"],
            "seconds": tuner.history[-1]["seconds"],
        }

    def _search(self, corpus: Corpus, cell: Cell, sampler: str) -> Row:
        """Run trials, and return the row of the best one, which a file keeps."""
        make, best = partial(self._problem, corpus, cell.seed), cell.folder / "best.json"

        def objective(problem: br.Problem) -> float:
            (cell.folder / "run.pt").unlink(missing_ok=True)
            row, before = self._train(corpus, cell, problem, br.Direct(), 0.0), runs.read_json(best)
            if before is None or row["validation perplexity"] < before["validation perplexity"]:
                runs.write_whole(best, row)
            return math.log(float(row["validation perplexity"]))

        storage = cell.folder / "search.db"
        more: dict[str, Any] = {"sampler": sampler, "trials": self.trials, "storage": storage}
        if sampler == "grid":  # a grid over seven hyperparameters would take at least 128 trials
            space = {"logit": (-4.0, 1.0), "log_penalty": (-5.0, 1.0)}
            found = br.search(lambda x: objective(_with_one_rate(make(), x)), space, seed=cell.seed, **more)
        else:
            found = br.search(objective, problem=make, seed=cell.seed + _SEED_OFFSETS[sampler], **more)
        spent = {"seconds": found.trials[-1]["seconds"], "weight steps": len(found.trials) * self.steps}
        return {**runs.read_json(best), "hyperparameters": len(found.values), **spent}

    def _overfit(self, corpus: Corpus, cell: Cell) -> Row:
        """Tune a weight decay for each weight, without dropout, on ten sequences for training and for validation."""
        problem = self._problem(corpus, cell.seed)
        model = problem.model.eval()
        assert isinstance(model, LanguageModel)
        for p in problem.hyperparameters.values():
            p.requires_grad_(False)
        decay = br.hyperparameters.WeightDecay(model, initial=math.exp(-8)).to(corpus.train.device)
        size = 10 * (self.length + 1)
        train, val = (text.sequences(s[:size], 10, self.length)[0] for s in (corpus.train, corpus.val))

        val_loss, output_loss = language.val_loss, br.losses.CrossEntropy(lambda batch: batch[1])
        problem = br.Problem(model, decay, lambda m, d, b: d(m) + val_loss(m, d, b), val_loss)
        curvature = br.GaussNewton(lambda m, _, b: m(b[0])[0], output_loss, decay)
        weight_optimizer = torch.optim.Adam(problem.weights.values(), 3e-3)
        hyper_optimizer = torch.optim.RMSprop(decay.parameters(), 0.05)
        steps = self.steps // self.weight_steps
        # With constant learning rates, both losses would keep jumping until the end.
        tuner = br.Tuner(
            problem,
            weight_optimizer,
            hyper_optimizer,
            br.Implicit(curvature=curvature),
            weight_steps=self.weight_steps,
            weight_scheduler=CosineAnnealingLR(weight_optimizer, steps * self.weight_steps),
            hyper_scheduler=CosineAnnealingLR(hyper_optimizer, steps),
            clip_weights=1.0,
            seed=cell.seed,
        )
        cell.fit(tuner, [train], [val], steps, self.save_every)
        perplexity = partial(language.perplexity, model)
        test = text.sequences(corpus.test, self.batch, self.length)
        return {
            "hyperparameters": sum(p.numel() for p in decay.parameters()),
            "training loss": math.log(perplexity([train])),
            "validation loss": math.log(perplexity([val])),
            "validation perplexity": perplexity([val]),
            "test perplexity": perplexity(test),
            "seconds": tuner.history[-1]["seconds"],
        }

    def table(self, rows: list[Row]) -> list[Row]:
        losses = ("training loss", "validation loss") if self.overfit else ()
        return runs.mean_and_deviation(rows, self.by, (*losses, *self.of))

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        return {f"test perplexity, {row['row']}": row["test perplexity"] for row in table}

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """Validation and test perplexity against weight steps; or both losses of the overfitting run."""
        first = {row["row"]: row for row in rows if row["seed"] == self.seed}
        history = {name: runs.read_rows(folder / row["folder"]) for name, row in first.items()}
        if self.overfit:
            _draw_losses(folder / self.figures[0], history["overfit"])
            return
        with plots.panels(folder / self.figures[0], 1, 2, (9.0, 3.8), sharex=True, sharey=True) as (axes,):
            axes[0].set_yscale("log")
            if _SAMPLERS.keys() & first.keys():  # whose trials take many more steps
                axes[0].set_xscale("log")
            for panel, key, title in zip(axes, ("val", "test"), ("validation", "test"), strict=True):
                for name, row in first.items():
                    look = {"color": _COLOURS[name], "label": name, "linewidth": 1.6}
                    if name in _SAMPLERS:  # the history has several trials, so only the result is shown
                        at, mark = row["weight steps"], _MARKS[name]
                        panel.plot([at], [row[f"{title} perplexity"]], mark, markerfacecolor="none", **look)
                    else:
                        plots.curve(panel, history[name], "weight_step", f"{key}_perplexity", **look)
                plots.style(panel, "weight steps", "" if panel is axes[1] else "perplexity", title)
            plots.legend_below(axes[0], 4)


def _draw_losses(path: Path, history: list[Row]) -> None:
    lines = ("train_loss", "training, with the decay", plots.GREY), ("val_loss", "validation", plots.BLUE)
    with plots.panels(path) as ((axes,),):
        axes.set_yscale("log")
        for key, label, colour in lines:
            line = [row | {key: max(row[key], 1e-4)} for row in history]
            plots.curve(axes, line, "hyper_step", key, color=colour, label=label, linewidth=1.5)
        axes.legend()
        plots.style(axes, "hyper-steps", "loss", "a weight decay for each weight of an LSTM")


@torch.no_grad()
def _with_one_rate(problem: br.Problem, values: Mapping[str, float]) -> br.Problem:
    """The problem with the same logit for all rates, and the same logarithm for both penalties."""
    for name, p in problem.hyperparameters.items():
        p.fill_(values["log_penalty" if name.startswith("log_penalties") else "logit"])
    return problem
