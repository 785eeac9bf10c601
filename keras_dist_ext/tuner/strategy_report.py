"""Report on each strategy of a search: trials, best score, throughput, and failures with their causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keras_dist_ext._keras.keras_tuner import keras_tuner
from keras_dist_ext.tuner.failures import Failure
from keras_dist_ext.tuner.meter import quartiles
from keras_dist_ext.tuner.records import ProjectRecords, TrialRecord
from keras_dist_ext.tuner.screening import ScreeningResult
from keras_dist_ext.tuner.strategies import HYPERPARAMETER

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["FailureCount", "StrategyReport", "StrategyRow", "build_report"]


@dataclass(frozen=True)
class FailureCount:
    """Trials that failed for the same kind of reason."""

    kind: str
    count: int
    causes: tuple[str, ...]  # each once


@dataclass(frozen=True)
class StrategyRow:
    """What is known of one strategy."""

    strategy: str  # its name in the search
    description: str  # such as "MirroredStrategy (2 replicas)"; "" where no trial ran under it
    num_trials: int  # that have started
    num_completed: int
    best_score: float | None
    best_trial: str | None
    examples_per_second: tuple[float, float, float] | None  # quartiles over trials, in the middle the median
    failures: tuple[FailureCount, ...]
    note: str = ""  # why the screening has dropped it


@dataclass(frozen=True)
class StrategyReport:
    """What is known of each strategy, as values and as a table."""

    objective: str  # the name of what the search minimizes or maximizes
    rows: tuple[StrategyRow, ...]  # one a strategy, in the order of the search

    def __iter__(self) -> Iterator[StrategyRow]:
        return iter(self.rows)

    def __getitem__(self, strategy: str) -> StrategyRow:
        """Return the row of a strategy by its name.

        Raises:
            KeyError: there is none.
        """
        for row in self.rows:
            if row.strategy == strategy:
                return row
        raise KeyError(f"{strategy!r}; there are {', '.join(row.strategy for row in self.rows)}")

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table("strategy", "trials", f"best {self.objective}", "examples/s (quartiles)", "failed")
        for row in self.rows:
            failed = [f"{f.count} {f.kind}: {'; '.join(f.causes)}" for f in row.failures]
            cells = (
                row.strategy,
                f"{row.num_completed} of {row.num_trials}",
                "" if row.best_score is None else f"{row.best_score:.6g} (trial {row.best_trial})",
                _spread(row.examples_per_second),
                "\n".join([*failed, *([f"dropped: {row.note}"] if row.note else [])]),
            )
            table.add_row(*(Text(cell, overflow="fold") for cell in cells))
        return table


def _spread(quartiles: tuple[float, float, float] | None) -> str:
    if quartiles is None:
        return ""
    low, middle, high = quartiles
    return f"{middle:.4g} ({low:.4g} to {high:.4g})"


def build_report(
    strategies: Sequence[str], objective: keras_tuner.Objective, records: ProjectRecords, result: ScreeningResult | None
) -> StrategyReport:
    """Return the report on a project from its files, whichever processes have written them.

    Args:
        strategies: their names in the search.
        objective: of the search.
        records: of the project.
        result: of the screening, if there was one.
    """
    trials = [
        keras_tuner.engine.trial.Trial.load(str(path)) for path in sorted(records.folder.glob("trial_*/trial.json"))
    ]
    known = records.all()
    rows = []
    for strategy in strategies:
        own = [trial for trial in trials if trial.hyperparameters.values.get(HYPERPARAMETER) == strategy]
        rows.append(_row(strategy, own, known, objective.direction == "max", result))
    return StrategyReport(objective.name, tuple(rows))


def _row(
    strategy: str,
    trials: Sequence[keras_tuner.engine.trial.Trial],
    known: dict[str, TrialRecord],
    is_max: bool,
    result: ScreeningResult | None,
) -> StrategyRow:
    completed = [trial for trial in trials if trial.status == "COMPLETED"]
    best = (max if is_max else min)(completed, key=lambda trial: trial.score, default=None)
    records = [known[trial.trial_id] for trial in trials if trial.trial_id in known]
    rates = [rate for record in records if record.failure is None for rate in record.examples_per_second]
    failed = [
        _failure_of(trial, known.get(trial.trial_id)) for trial in trials if trial.status in ("FAILED", "INVALID")
    ]
    counts = Counter(failure.kind for failure in failed)
    return StrategyRow(
        strategy=strategy,
        description=next((record.description for record in records if record.description), ""),
        num_trials=len(trials),
        num_completed=len(completed),
        best_score=None if best is None else float(best.score),
        best_trial=None if best is None else best.trial_id,
        examples_per_second=quartiles(rates),
        failures=tuple(
            FailureCount(kind, count, tuple(dict.fromkeys(f.cause for f in failed if f.kind == kind)))
            for kind, count in counts.most_common()
        ),
        note="" if result is None else result.dropped.get(strategy, ""),
    )


def _failure_of(trial: keras_tuner.engine.trial.Trial, record: TrialRecord | None) -> Failure:
    """Return the recorded failure, or else the last line of keras-tuner's message."""
    if record is not None and record.failure is not None:
        return record.failure
    lines = [line.strip() for line in (trial.message or "").splitlines() if line.strip()]
    return Failure("user error", lines[-1] if lines else "no cause was recorded")
