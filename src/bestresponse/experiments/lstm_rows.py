"""The rows of the comparison of section 5.5."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from ..curvatures import GaussNewton
from ..hypernetworks import SelfTuning
from ..hyperparameters import WeightDecay
from ..losses import CrossEntropy
from ..methods import Direct, Implicit, Method
from ..problem import Problem
from ..runs import callbacks
from ..search import search
from ..solvers import Identity, Neumann
from ..tuner import Tuner
from . import language, text
from .cells import Cell
from .language import LanguageModel, Regulariser

if TYPE_CHECKING:
    from .lstm import LSTM

SAMPLERS = {"grid search": "grid", "random search": "random", "Bayesian optimisation": "tpe"}
_PATIENCE = 5
# Bayesian optimisation begins with random trials, which should be others than those of random search.
_APART = {"random": 0, "tpe": 1_000_000}


@dataclass(frozen=True)
class LanguageCell(Cell):
    """One row of one seed."""

    config: "LSTM"
    corpus: text.Corpus

    def settings(self) -> dict[str, Any]:
        """All that the row depends on."""
        kept = super().settings()
        if self.name not in SAMPLERS:
            del kept["trials"]
        if self.name != "self-tuning network":
            del kept["response_cost"]
        return kept

    def run(self) -> dict[str, Any]:
        """Run the row."""
        if self.name == "overfit":
            return self._overfit()
        if self.name in SAMPLERS:
            return self._search(SAMPLERS[self.name])
        return self._tune()

    def _problem(self, many: bool = False) -> Problem:
        config = self.config
        torch.manual_seed(self.seed)
        rates = Regulariser(config.units, many, config.initial_rate)
        model = LanguageModel(len(self.corpus.words), config.units, config.batch, rates=rates).to(self.device)
        return Problem(model, model.rates, language.train_loss, language.val_loss)

    def _batches(self, stream: Tensor) -> list[language.Batch]:
        pairs = text.sequences(stream, self.config.batch, self.config.length)
        return [(x.to(self.device), y.to(self.device)) for x, y in pairs]

    def _tune(self) -> dict[str, Any]:
        """Weights and rates together."""
        config = self.config
        problem = self._problem(many=self.name == "many rates")
        if self.name == "no tuning":
            return self._train(problem, Direct(), config.budget, 0.0)
        if self.name == "self-tuning network":
            network = SelfTuning(problem, 0.3)
            steps = int(config.budget / (config.response_cost + 1.0 / config.weight_steps))
            return self._train(network.problem, Direct(), steps, config.hyper_rate, network)
        method = Implicit(Neumann(config.terms, 0.1) if config.terms else Identity())
        share = config.weight_steps / (config.weight_steps + config.hyper_cost)
        return self._train(problem, method, int(config.budget * share), config.hyper_rate)

    def _train(
        self,
        problem: Problem,
        method: Method,
        steps: int,
        hyper_rate: float,
        network: SelfTuning | None = None,
    ) -> dict[str, Any]:
        """Train for so many weight steps; the row of the best validation perplexity."""
        config = self.config
        train, val, test = (self._batches(s) for s in (self.corpus.train, self.corpus.val, self.corpus.test))
        given = problem if network is None else network.source
        frozen = hyper_rate == 0.0
        # Without tuning a hyper-step, which moves nothing, comes once an epoch.
        weight_steps = max(1, steps // max(1, round(steps / len(train)))) if frozen else config.weight_steps

        def measure(*_: Any) -> dict[str, float]:
            if network is not None:
                network.write_()
            assert isinstance(given.model, LanguageModel)
            values = {
                "val": language.perplexity(given.model, val),
                "test": language.perplexity(given.model, test),
            }
            return {f"{name}_perplexity": value for name, value in values.items()}

        every = max(1, len(train) // weight_steps)
        optimizer = torch.optim.SGD(problem.weights.values(), config.weight_rate)
        tuner = Tuner(
            problem,
            optimizer,
            torch.optim.Adam(problem.hyperparameters.values(), hyper_rate),
            method,
            weight_steps=weight_steps,
            clip_weights=config.clip,
            seed=self.seed,
            callbacks=[callbacks.Evaluate(measure, every), Falling()],
        )
        self.fit(tuner, train, val, max(1, steps // weight_steps), 1 if frozen else config.save_every)
        return self._best(tuner.history, sum(p.numel() for p in given.hyperparameters.values()), frozen)

    def _best(self, history: list[dict[str, Any]], tuned: int, frozen: bool) -> dict[str, Any]:
        best = min((r for r in history if "val_perplexity" in r), key=lambda r: r["val_perplexity"])
        return {
            "hyperparameters": 0 if frozen else tuned,
            "validation perplexity": best["val_perplexity"],
            "test perplexity": best["test_perplexity"],
            "seconds": history[-1]["seconds"],
        }

    def _search(self, sampler: str) -> dict[str, Any]:
        """Trials that share the budget, and a training under the values of the best one."""
        config = self.config
        steps = max(1, config.budget // (config.trials + 1))

        def trained(problem: Problem) -> dict[str, Any]:
            (self.folder / "run.pt").unlink(missing_ok=True)
            return self._train(problem, Direct(), steps, 0.0)

        def objective(problem: Problem) -> float:
            return math.log(float(trained(problem)["validation perplexity"]))

        def together(values: dict[str, float]) -> float:
            return objective(_with_one_rate(self._problem(), values))

        storage, trials = self.folder / "search.db", config.trials
        if sampler == "grid":  # seven hyperparameters would take 128 trials
            space = {"logit": (-4.0, 1.0), "log_penalty": (-5.0, 1.0)}
            found = search(together, space, sampler=sampler, trials=trials, storage=storage, seed=self.seed)
            problem = _with_one_rate(self._problem(), found.values)
        else:
            make = self._problem
            found = search(
                objective,
                problem=make,
                sampler=sampler,
                trials=trials,
                storage=storage,
                seed=self.seed + _APART[sampler],
            )
            problem = make()
            found.write_(problem)
        row = trained(problem)
        return {
            **row,
            "hyperparameters": len(found.values),
            "seconds": found.trials[-1]["seconds"] + row["seconds"],
        }

    def _overfit(self) -> dict[str, Any]:
        """A weight decay for each weight, without dropout, on ten sequences each."""
        config = self.config
        problem = self._problem()
        model = problem.model.eval()
        for p in problem.hyperparameters.values():
            p.requires_grad_(False)
        decay = WeightDecay(model, initial=math.exp(-8)).to(self.device)
        train, val = (self._ten(s) for s in (self.corpus.train, self.corpus.val))

        def train_loss(model: nn.Module, decay: nn.Module, batch: language.Batch) -> Tensor:
            penalty: Tensor = decay(model)
            return language.val_loss(model, None, batch) + penalty  # type: ignore[arg-type]

        problem = Problem(model, decay, train_loss, language.val_loss)
        curvature = GaussNewton(lambda m, _, b: m(b[0])[0], CrossEntropy(lambda batch: batch[1]), decay)
        weight_optimizer = torch.optim.Adam(problem.weights.values(), 3e-3)
        hyper_optimizer = torch.optim.RMSprop(decay.parameters(), 0.05)
        steps = config.budget // config.weight_steps
        # At constant rates both losses jump to the end.
        tuner = Tuner(
            problem,
            weight_optimizer,
            hyper_optimizer,
            Implicit(curvature=curvature),
            weight_steps=config.weight_steps,
            weight_scheduler=CosineAnnealingLR(weight_optimizer, steps * config.weight_steps),
            hyper_scheduler=CosineAnnealingLR(hyper_optimizer, steps),
            clip_weights=1.0,
            seed=self.seed,
        )
        self.fit(tuner, [train], [val], steps, config.save_every)
        assert isinstance(model, LanguageModel)
        learnt = language.perplexity(model, [val])
        return {
            "hyperparameters": sum(p.numel() for p in decay.parameters()),
            "training loss": math.log(language.perplexity(model, [train])),
            "validation loss": math.log(learnt),
            "validation perplexity": learnt,
            "test perplexity": language.perplexity(model, self._batches(self.corpus.test)),
            "seconds": tuner.history[-1]["seconds"],
        }

    def _ten(self, stream: Tensor) -> language.Batch:
        words, following = text.sequences(stream[: 10 * (self.config.length + 1)], 10, self.config.length)[0]
        return words.to(self.device), following.to(self.device)


class Falling:
    """A quarter of the learning rate where validation is worse than the best of all but the last five measurements."""

    def __init__(self) -> None:
        self._seen: list[float] = []

    def __call__(self, tuner: Tuner) -> None:
        value = tuner.history[-1].get("val_perplexity")
        if value is None:
            return
        if len(self._seen) > _PATIENCE and value > min(self._seen[:-_PATIENCE]):
            assert isinstance(tuner.weight_optimizer, torch.optim.Optimizer)
            for group in tuner.weight_optimizer.param_groups:
                group["lr"] /= 4.0
            self._seen = []
        self._seen.append(value)

    def state_dict(self) -> dict[str, Any]:
        """The measurements since the rate fell."""
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict`."""
        self._seen = list(state["seen"])


@torch.no_grad()
def _with_one_rate(problem: Problem, values: dict[str, float]) -> Problem:
    """The problem with one logit for all rates, and one logarithm for both penalties."""
    for name, p in problem.hyperparameters.items():
        p.fill_(values["log_penalty" if name.startswith("log_penalties") else "logit"])
    return problem
