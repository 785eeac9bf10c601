"""Measure what it costs to see every replica: `fit` with ReplicaMonitor and ReplicaSeeds, without, and stock Keras.

    python benchmarks/bench_monitor.py                       # about 50 minutes, by an estimate
    python benchmarks/bench_monitor.py --models tiny --replicas 1,2 --rounds 5

The contestants train the same model, with the same optimizer, on the same batch, again and again:

* stock: `keras.Model.fit` as it comes.
* stock+tb: the same with `keras.callbacks.TensorBoard(update_freq=1)`: the loss of all replicas together, each step.
* ours: `kde.Model.fit` as it comes.
* watched: the same with `ReplicaMonitor(folder)` and `ReplicaSeeds(1)`: loss, examples and times of each replica.

Each row is a process of its own. Ours and watched have copies of their own each round, built and compiled for it in
changing order, and warmed up: two copies of the same may differ by more than what is measured. Stock is in the first
three rounds. A sample is one call to `fit`, with epochs of three quarters of a second. The calls of a round run in
threads that hand over to each other at the end of what is under way after 80 ms, so that only one trains at a time and
what slows the machine for a second slows all; each is stopped after as many such slices, and the first four are not
counted. The callback that hands over is there in all of them. Differences are taken round by round; what watching adds
is their middle, and ± its standard error (`harness.Estimate`): few copies are 5% faster or slower than all others. A
goal is met where the middle is below the bound by more than this error. Replicas are logical CPU devices.

In the row `single` every step is an execution of its own, as callbacks want it that look at each batch: it is the tiny
model with `steps_per_execution=1`. The CNN has strides instead of pooling, of whose gradient TensorFlow takes one of
two kernels by chance (`cases.py`).
"""

from __future__ import annotations

import functools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from cases import MODELS, Case, Classes, Job, batches_of, run_rows, start
from harness import Goal, Timings, print_goals, print_table, take_slices

SLICE_SECONDS = 0.08
WARM_UP_SLICES = 4  # fit begins with short executions, and whoever comes later finds cold caches
# TensorFlow's executor learns from each op's times whether it may hand it to another thread (`KernelStats` in
# core/common_runtime/executor.cc), which is likely why steps become faster and more alike: an LSTM's at 4 replicas
# took 4.7 to 4.9 ms after 100 steps (standard deviation of copies: 0.4 ms), 3.9 ms after 500 (0.1), and 3.6 ms after
# 3000 to 3500 (0.01 to 0.08): what the first of them say of two copies is mostly chance.
WARM_UP_STEPS = 3000
MOST_WARM_UP_SECONDS = 8.0
EPOCH_SECONDS = 0.75
STOCK_ROUNDS = 3
CONTESTANTS = ("stock", "stock+tb", "ours", "watched")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the goals; return 1 unless all goals that were measured are met."""
    console, values = run_rows(
        arguments,
        __file__,
        __doc__,
        CONTESTANTS,
        measure,
        _summary,
        models="tiny,single,strided,lstm",
        replicas="1,2,4",
        rounds=10,
        seconds=1.5,
    )
    timings = {row: Timings(**value) for row, value in values.items()}
    print_table(console, *_table(timings))
    goals = _goals(timings)
    print_goals(console, goals)
    return int(any(goal.misses or goal.unclear for goal in goals))


def measure(job: Job) -> Timings:
    """Time the contestants in turn, in this process.

    Raises:
        RuntimeError: TensorFlow or a contestant could not train.
    """
    strategy = start(job.num_replicas)
    import keras

    import keras_dist_ext as kde

    stock, ours = Classes(keras.Model, keras.Sequential), Classes(kde.Model, kde.Sequential)
    with tempfile.TemporaryDirectory() as folder:
        contestants: dict[str, tuple[Classes, Callable[[], list[Any]]]] = {
            "stock": (stock, list),
            "stock+tb": (stock, lambda: [keras.callbacks.TensorBoard(f"{folder}/stock", update_freq=1)]),
            "ours": (ours, list),
            "watched": (ours, lambda: [kde.ReplicaMonitor(f"{folder}/ours"), kde.ReplicaSeeds(1)]),
        }
        prepare = {
            name: functools.partial(_prepare, classes, job, strategy, make_callbacks)
            for name, (classes, make_callbacks) in contestants.items()
        }
        stocks = ("stock", "stock+tb")  # ours is so far from these that one copy and a few rounds are enough
        prepare |= {name: functools.cache(prepare[name]) for name in stocks}
        return take_slices(prepare, job.num_rounds, dict.fromkeys(stocks, STOCK_ROUNDS))


def _prepare(
    classes: Classes, job: Job, strategy: Any, make_callbacks: Callable[[], list[Any]]
) -> Callable[[Callable[[], None]], float]:
    """Build, compile and warm up a model; return what trains it for the job's time and returns its seconds a step.

    Callbacks are its own: a monitor begins anew, with short intervals, where the model is another one.
    """
    import keras

    keras.utils.set_random_seed(0)
    case = MODELS[job.model]
    fit = functools.partial(_model(classes, case, strategy).fit, batches_of(case), verbose=0, shuffle=False)
    callbacks = make_callbacks()
    train = _slices(fit, callbacks)
    train(10, 1, _go_on)  # compiles
    step_seconds = train(100, 3, _go_on)
    steps_of_epoch = max(1, round(EPOCH_SECONDS / step_seconds))
    num_steps = min(WARM_UP_STEPS, MOST_WARM_UP_SECONDS / step_seconds)
    num_epochs = math.ceil(num_steps / steps_of_epoch)
    fit(epochs=num_epochs, steps_per_epoch=steps_of_epoch, callbacks=[*callbacks, _clock()])
    return lambda hand_over: train(steps_of_epoch, max(1, round(job.seconds / SLICE_SECONDS)), hand_over)


def _go_on() -> None:
    """Hand over to nobody."""


def _model(classes: Classes, case: Case, strategy: Any) -> Any:
    with strategy.scope():
        model = case.build(classes)
        model.compile("adam", case.loss, **case.compile_options)
    return model


def _slices(fit: Callable[..., Any], callbacks: list[Any]) -> Callable[[int, int, Callable[[], None]], float]:
    """Return what trains for so many timed slices, handing over after each, and returns its seconds a step."""
    clock = _clock()

    def train(steps_of_epoch: int, num_slices: int, hand_over: Callable[[], None]) -> float:
        clock.num_slices, clock.hand_over = num_slices, hand_over
        fit(epochs=1_000_000, steps_per_epoch=steps_of_epoch, callbacks=[*callbacks, clock])  # the clock stops it
        return clock.step_seconds

    return train


def _clock() -> Any:
    """Return a callback that hands over after each slice, adds up the time of those that count, and stops training."""
    import keras_dist_ext as kde

    class Clock(kde.RunCallback):
        supports_multi_step = True  # see `kde.ReplicaMonitor`: several steps at once are fine
        num_slices = math.inf
        hand_over: Callable[[], None] = staticmethod(_go_on)

        def on_train_begin(self, logs: Any = None) -> None:
            self.slices_over = 0
            self.total_seconds, self.total_steps = 0.0, 0
            self._begin_slice()

        def _begin_slice(self) -> None:
            self.counts = math.isfinite(self.num_slices) and self.slices_over >= WARM_UP_SLICES
            self.steps_of_slice, self.began = 0, time.perf_counter()

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.last_batch = -1

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps_of_slice += batch - self.last_batch
            self.last_batch = batch
            seconds = time.perf_counter() - self.began
            if seconds > SLICE_SECONDS:
                if self.counts:
                    self.total_seconds += seconds
                    self.total_steps += self.steps_of_slice
                self.slices_over += 1
                self.model.stop_training = self.slices_over == WARM_UP_SLICES + self.num_slices
                if not self.model.stop_training:
                    self.hand_over()
                    self._begin_slice()

        @property
        def step_seconds(self) -> float:
            return self.total_seconds / self.total_steps

    return Clock()


def _summary(value: dict[str, Any]) -> str:
    """What is said of a row when it is measured."""
    timing = Timings(**value)
    added, ratio = timing.added("watched", "ours").show(1, 1e6), timing.ratio("watched", "stock").show()
    return f"watching adds {added} µs; watched / stock {ratio}"


def _table(timings: dict[str, Timings]) -> tuple[str, list[str], list[list[str]]]:
    """Return the title, columns and rows of the table."""
    columns = ["model", *CONTESTANTS, "watching adds", "tb adds", "watched / stock", "others"]
    rows = [
        [
            row,
            *(timing.spread(name).show(0, 1e6) for name in CONTESTANTS),
            timing.added("watched", "ours").show(1, 1e6),
            timing.added("stock+tb", "stock").show(0, 1e6),
            timing.ratio("watched", "stock").show(),
            f"{timing.others_cores:.1f}",
        ]
        for row, timing in timings.items()
    ]
    return "µs a step: median (quartiles); others: cores that other processes took meanwhile", columns, rows


def _goals(timings: dict[str, Timings]) -> list[Goal]:
    """Return what watching may cost, with the figures of this run."""
    added = {row: timing.added("watched", "ours") for row, timing in timings.items()}
    bare = {row: timing.spread("ours").median for row, timing in timings.items()}
    percent = {row: 100 / seconds for row, seconds in bare.items() if seconds > 5e-3}
    micros = {row: 1e6 for row in timings if row not in percent}
    ratios = {row: timing.ratio("watched", "stock").median for row, timing in timings.items()}
    return [
        *(
            Goal(
                text,
                bound,
                {row: scale * added[row].middle for row, scale in scales.items()},
                {row: scale * added[row].error for row, scale in scales.items()},
            )
            for text, bound, scales in (
                ("watching adds at most 1% to steps over 5 ms", 1.0, percent),
                ("watching adds at most 30 µs to shorter steps", 30.0, micros),
            )
        ),
        Goal("watched takes at most as long as stock fit, unwatched", 1.0, ratios),
    ]


if __name__ == "__main__":
    sys.exit(main())
