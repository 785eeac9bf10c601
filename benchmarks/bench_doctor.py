"""Measure what the doctor's passive part costs: `fit` with ParallelismDoctor and without.

    python benchmarks/bench_doctor.py                       # about 8 minutes
    python benchmarks/bench_doctor.py --models cnn --replicas 2 --rounds 5

The contestants train the same model, with the same optimizer, on the same batch, again and again:

* ours: `kde.Model.fit` as it comes.
* doctor: the same with `ParallelismDoctor()`, which records steps, times callbacks and watches for tracing. Steps
  shorter than 3 ms it records for two seconds only, here for a tenth of one: what is timed comes after that.
* watching: the same with a doctor that never has enough, so that all steps are recorded whatever they cost.

Each row is a process of its own, in which the contestants run in turn, each with several copies. A sample is one call
to `fit` with three epochs, of which the last is timed; ratios are taken round by round. What the doctor does when
training ends, some 10 ms to judge and to print, is not in it; nor are experiments. Replicas are logical CPU devices.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from cases import MODELS, Case, Classes, Job, batches_of, epoch_times, run_rows, start
from harness import Goal, Timings, print_goals, print_table, several_copies, take_turns

NUM_COPIES = 4
CONTESTANTS = ("ours", "doctor", "watching")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the goals; return 1 if a goal is missed."""
    console, values = run_rows(
        arguments,
        __file__,
        __doc__,
        CONTESTANTS,
        measure,
        models="tiny,mlp512,cnn,lstm",
        replicas="1,2",
        rounds=12,
        seconds=0.4,
    )
    timings = {row: Timings(**value) for row, value in values.items()}
    print_table(console, *_table(timings))
    goals = _goals(timings)
    print_goals(console, goals)
    return int(any(goal.misses for goal in goals))


def measure(job: Job) -> Timings:
    """Time the contestants in turn, in this process.

    Raises:
        RuntimeError: TensorFlow or a contestant could not train.
    """
    strategy = start(job.num_replicas)
    import keras

    import keras_dist_ext as kde
    from keras_dist_ext.diagnosis.doctor import step_blocks

    step_blocks._ENOUGH_SECONDS = 0.1

    class Watching(kde.ParallelismDoctor):  # type: ignore[misc]
        """A doctor that records every step."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._trace._blocks.__class__ = _Insatiable
            super().on_train_batch_end(batch, logs)

    class _Insatiable(step_blocks.StepBlocks):
        is_enough = False

    doctors: dict[str, Callable[[], list[Any]]] = {
        "ours": list,
        "doctor": lambda: [kde.ParallelismDoctor(show=False)],
        "watching": lambda: [Watching(show=False)],
    }

    def prepare(callbacks: Callable[[], list[Any]]) -> Callable[[], float]:
        keras.utils.set_random_seed(0)
        train = _fit(MODELS[job.model], strategy, callbacks())
        train(10)  # compiles
        num_steps = round(job.seconds / train(200))
        train(num_steps)  # compiles what records nothing
        return lambda: train(num_steps)

    contestants = {name: functools.partial(prepare, callbacks) for name, callbacks in doctors.items()}
    return take_turns(several_copies(contestants, NUM_COPIES), job.num_rounds)


def _fit(case: Case, strategy: Any, callbacks: list[Any]) -> Callable[[int], float]:
    """Build a model, and return what trains it for three epochs of so many steps; it returns the last one's seconds."""
    import keras_dist_ext as kde

    dataset = batches_of(case)
    with strategy.scope():
        model = case.build(Classes(kde.Model, kde.Sequential))
        model.compile("adam", case.loss)
    times = epoch_times()

    def train(num_steps: int) -> float:
        model.fit(dataset, epochs=3, steps_per_epoch=num_steps, verbose=0, callbacks=[*callbacks, times], shuffle=False)
        return (times.ends[-1] - times.ends[-2]) / num_steps

    return train


def _table(timings: dict[str, Timings]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, columns and rows of the table."""
    columns = ["model", *CONTESTANTS, "doctor / ours", "watching / ours", "others"]
    rows = [
        [
            row,
            *(timing.spread(name).show(0, 1e6) for name in CONTESTANTS),
            timing.ratio("doctor", "ours").show(3),
            timing.ratio("watching", "ours").show(3),
            f"{timing.others_cores:.1f}",
        ]
        for row, timing in timings.items()
    ]
    return "µs a step: median (quartiles); others: cores that other processes took meanwhile", columns, rows


def _goals(timings: dict[str, Timings]) -> list[Goal]:
    """Return what the doctor may cost, with the figures of this run."""
    costs = {row: 100 * (timing.ratio("doctor", "ours").median - 1) for row, timing in timings.items()}
    return [Goal("the doctor's passive part costs at most 1%", 1.0, costs)]


if __name__ == "__main__":
    sys.exit(main())
