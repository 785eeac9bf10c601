"""Measure what it costs to save a run while it trains, and how soon a run is back in training after a crash.

    python benchmarks/bench_resume.py                       # about 8 minutes
    python benchmarks/bench_resume.py --models tiny --rounds 3

The contestants train the same model, with the same optimizer, on the same batch, again and again:

* plain: `kde.Model.fit` as it comes.
* saved: the same with `Resume(folder)`: the end of each epoch, which is about a second long.
* every100: the same with `Resume(folder, 100)`: a save every 100 steps.
* backup: the same with `keras.callbacks.BackupAndRestore(folder)`, which saves weights alone, while training waits.

Each row is a process of its own, in which the contestants run in turn. A sample is one call to `fit` with three epochs,
of which the last two are timed; ratios are taken round by round. Then `fit` is called until its first step is over, by
a run that begins and by one that goes on from a save: the difference is what going on takes beside starting TensorFlow.
At the end `recovery.py` has two workers die or hang under `launch`.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import recovery
from cases import MODELS, Case, Classes, Job, batches_of, epoch_times, run_rows, start
from harness import Goal, Spread, Timings, print_goals, print_table, take_turns

CONTESTANTS = ("plain", "saved", "every100", "backup")
_RECOVERIES = 3  # of each kind of accident


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and the goals; return 1 if a goal is missed."""
    console, values = run_rows(
        arguments,
        __file__,
        __doc__,
        CONTESTANTS,
        measure,
        models="tiny,mlp512,cnn",
        replicas="1,2",
        rounds=7,
        seconds=2.0,
    )
    timings = {row: Timings(**value["timings"]) for row, value in values.items()}
    starts = {row: value["starts"] for row, value in values.items()}
    rows = [
        [
            row,
            timing.spread("plain").show(0, 1e6),
            *(timing.ratio(name, "plain").show(3) for name in CONTESTANTS[1:]),
            *(Spread.of(starts[row][name]).show(2) for name in ("begins", "goes on")),
            f"{timing.others_cores:.1f}",
        ]
        for row, timing in timings.items()
    ]
    columns = ["model", "plain, µs", *(f"{name} / plain" for name in CONTESTANTS[1:]), "begins, s", "goes on, s"]
    print_table(console, "a step: median (quartiles); seconds to the first step", [*columns, "others"], rows)
    goal = Goal(
        "saving takes at most 2% at the default interval",
        1.02,
        {row: timing.ratio("saved", "plain").median for row, timing in timings.items()},
    )
    print_goals(console, [goal])
    return max(int(bool(goal.misses)), recovery.report(console, _RECOVERIES))


def measure(job: Job) -> dict[str, Any]:
    """Time the contestants in turn, in this process.

    Raises:
        RuntimeError: TensorFlow or a contestant could not train.
    """
    strategy = start(job.num_replicas)
    import keras

    import keras_dist_ext as kde

    with tempfile.TemporaryDirectory() as folder:
        new = (f"{folder}/{number}" for number in itertools.count())
        contestants: dict[str, Callable[[], list[Any]]] = {
            "plain": list,
            "saved": lambda: [kde.Resume(next(new))],
            "every100": lambda: [kde.Resume(next(new), 100)],
            "backup": lambda: [keras.callbacks.BackupAndRestore(next(new))],
        }
        case = MODELS[job.model]
        trials: dict[str, Callable[[], float]] = {}
        for name, callbacks in contestants.items():
            train = _fit(case, strategy, callbacks)
            train(10)  # compiles
            num_steps = round(job.seconds / train(200))
            trials[name] = lambda train=train, num_steps=num_steps: train(num_steps)  # type: ignore[misc]
        timings = take_turns(trials, job.num_rounds)
        starts: dict[str, list[float]] = {"begins": [], "goes on": []}
        for _ in range(job.num_rounds):
            run = next(new)
            starts["begins"].append(_first_step(case, strategy, run))
            starts["goes on"].append(_first_step(case, strategy, run))
    return {"timings": dataclasses.asdict(timings), "starts": starts}


def _model(case: Case, strategy: Any) -> Any:
    import keras

    import keras_dist_ext as kde

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = case.build(Classes(kde.Model, kde.Sequential))
        model.compile("adam", case.loss)
    return model


def _fit(case: Case, strategy: Any, callbacks: Callable[[], list[Any]]) -> Callable[[int], float]:
    """Build a model, and return what trains it for so many timed steps and returns its seconds a step."""
    model, data, times = _model(case, strategy), batches_of(case), epoch_times()
    model.build((None, *case.input_shape))

    def train(num_steps: int) -> float:
        half = max(1, num_steps // 2)
        model.fit(data, epochs=4, steps_per_epoch=half, verbose=0, callbacks=[*callbacks(), times], shuffle=False)
        return (times.begins[-1] - times.begins[1]) / (2 * half)

    return train


def _first_step(case: Case, strategy: Any, folder: str) -> float:
    """Return the seconds from the call to `fit` to the end of its first step; go on for another, and leave a save."""
    import keras

    import keras_dist_ext as kde

    model, data = _model(case, strategy), batches_of(case)
    ends: list[float] = []
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    resume = kde.Resume(folder, 1)
    began = time.perf_counter()
    epochs = 2 if pathlib.Path(folder).exists() else 1
    model.fit(data, epochs=epochs, steps_per_epoch=2, verbose=0, callbacks=[resume, clock], shuffle=False)
    return ends[0] - began


if __name__ == "__main__":
    sys.exit(main())
