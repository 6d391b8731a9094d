"""Dropout rates of an LSTM, tuned by every rival at equal cost; and validation text learnt by heart: section 5.5."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from . import plots, runs, text
from .cells import check_rows
from .lstm_rows import SAMPLERS, LanguageCell
from .options import Options, Preset

Row = Literal[
    "no tuning",
    "grid search",
    "random search",
    "Bayesian optimisation",
    "self-tuning network",
    "7 rates",
    "many rates",
]
ROWS: tuple[Row, ...] = get_args(Row)
_COLOURS = dict(
    zip(
        ROWS,
        (plots.GREY, "#b8b8b8", plots.ORANGE, "#8c6d31", plots.GREEN, plots.RED, plots.BLUE),
        strict=True,
    )
)


@dataclass(kw_only=True)
class LSTM(Options):
    """Tune the dropout rates of an LSTM language model in seven ways at equal cost, or overfit its validation text.

    A budget of training gradients is the same for all: a hyper-step counts as --hyper-cost of them, a step of the
    self-tuning network as --response-cost, and a search divides its budget by its trials. The same command again goes
    on where it was stopped, and ends with the same numbers. With --overfit there is one run instead: a weight decay for
    each weight, tuned on ten sequences, with ten others to train on.
    """

    data: Literal["python", "ptb"] = "python"
    """The text: the help that comes with Python, or the Penn TreeBank from --data-dir."""
    words: int = 500
    """Of the vocabulary, the most frequent ones; 0 takes all."""
    train_words: int = 20_000
    """Of the training text, and an eighth for validation and test each; 0 takes all."""
    units: int = 32
    """Of each of the two layers, and of the embeddings."""
    batch: int = 20
    """Sequences side by side."""
    length: int = 20
    """Words of a sequence."""
    budget: int = 600
    """In training gradients, for each row."""
    rows: tuple[Row, ...] = ROWS
    """The rows of the table."""
    weight_steps: int = 10
    """Weight steps before each hyper-step."""
    weight_rate: float = 20.0
    """SGD's learning rate, which falls by four where validation stops to improve."""
    clip: float = 0.25
    """The largest norm of a gradient."""
    hyper_rate: float = 0.05
    """Adam's learning rate for logits of the rates and logarithms of the penalties."""
    terms: int = 0
    """Neumann terms of the hypergradient; 0 is the identity (T1 − T2)."""
    initial_rate: float = 0.5
    """Of dropout, everywhere."""
    trials: int = 16
    """Of a search. The budget is shared by them and by a training under the best values."""
    hyper_cost: float = 4.0
    """Training gradients that a hyper-step takes as long as."""
    response_cost: float = 1.4
    """Training gradients that a step of the self-tuning network takes as long as."""
    save_every: int = 20
    """Hyper-steps between two saved states."""
    overfit: bool = False
    """Whether to overfit the validation text instead: --budget weight steps, --weight-steps of them before each
    hyper-step, on ten sequences of --length words for training and ten for validation. --units, --seed and
    --save-every count as well; the other options do not."""


PRESETS: dict[Preset, LSTM] = {
    "smoke": LSTM(),
    "cpu": LSTM(
        preset="cpu",
        data="ptb",
        words=2000,
        train_words=100_000,
        units=100,
        length=35,
        budget=4000,
        trials=4,
    ),
    "paper": LSTM(
        preset="paper",
        data="ptb",
        words=0,
        train_words=0,
        units=650,
        batch=40,
        length=70,
        budget=100_000,
        weight_rate=30.0,
        hyper_rate=1e-3,
        weight_steps=1,
        trials=50,
    ),
}


def run(config: LSTM) -> Path:
    """Run the experiment and return its folder."""
    positive = ("units", "batch", "length", "budget", "weight_steps", "weight_rate", "clip", "hyper_rate")
    more = ("trials", "hyper_cost", "response_cost", "save_every")
    device = config.begin((*positive, *more), ("words", "train_words", "terms"))
    check_rows(config.rows)
    corpus = text.load(config.data, config.data_dir, config.words, config.train_words)
    kind = "overfit" if config.overfit else "rates"
    folder = config.out or Path("runs") / f"lstm-{config.data}-{kind}"
    record = runs.Run(folder, "lstm", config, figures=["lstm.png"])
    names = ["overfit"] if config.overfit else list(config.rows)
    for seed in config.all_seeds():
        for name in names:
            record.write(LanguageCell(config, device, name, seed, folder, corpus).result())
    rows = runs.read_rows(folder)
    values = ["validation perplexity", "test perplexity", "seconds"]
    if config.overfit:
        values = ["training loss", "validation loss", *values]
    table = runs.mean_and_deviation(rows, ["row", "hyperparameters"], values)
    draw(folder, runs.read_config(folder), rows)
    headline = {f"test perplexity, {r['row']}": r["test perplexity"] for r in table}
    record.finish(headline, table, config.seed, folders=[row["folder"] for row in rows])
    return folder


def draw(folder: Path, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[Path]:
    """Validation and test perplexity against time; or both losses of the overfitting run."""
    path = folder / "lstm.png"
    first = [row for row in rows if row["seed"] == config["seed"]]
    if config["overfit"]:
        with plots.panels(path) as axes:
            history = runs.read_rows(folder / first[0]["folder"])
            for key, colour in (("train_loss", plots.GREY), ("val_loss", plots.BLUE)):
                line = [max(row[key], 1e-4) for row in history]
                label = {"train_loss": "training, with the decay", "val_loss": "validation"}[key]
                axes[0, 0].plot([r["hyper_step"] for r in history], line, color=colour, label=label)
            axes[0, 0].set_yscale("log")
            axes[0, 0].legend(frameon=False)
            plots.style(axes[0, 0], "hyper-steps", "loss", "a weight decay for each weight of an LSTM")
        return [path]
    with plots.panels(path, 1, 2, (9.0, 3.8), sharey=True) as axes:
        for panel, key, title in zip(
            axes[0], ("val_perplexity", "test_perplexity"), ("validation", "test"), strict=True
        ):
            for row in first:
                look = {"color": _COLOURS[row["row"]], "label": row["row"]}
                if (
                    row["row"] in SAMPLERS
                ):  # whose file has one trial after the other, each from its beginning
                    panel.plot([row["seconds"]], [row[f"{title} perplexity"]], "o", **look)
                    continue
                history = [r for r in runs.read_rows(folder / row["folder"]) if key in r]
                panel.plot([r["seconds"] for r in history], [r[key] for r in history], **look, linewidth=1.6)
            panel.set_yscale("log")
            plots.style(panel, "seconds", "perplexity" if panel is axes[0, 0] else "", title)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure = axes[0, 0].figure
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return [path]
