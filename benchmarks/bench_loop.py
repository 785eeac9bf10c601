"""Compare a `TrainLoop` with the same loop written by hand, and with `orbit` where that is installed.

    python benchmarks/bench_loop.py                       # about 6 minutes
    python benchmarks/bench_loop.py --models tiny --replicas 1,2 --rounds 5

The contestants train the same Keras model, with the same optimizer, on the same batch, again and again:

* floor: a `tf.function` that loops over `strategy.run(step)` with `tf.range`; no logs, no callbacks (see `bench_fit`).
* ours: `kde.TrainLoop` with the same step, through `fit`; the loss of every epoch is in its logs.
* watched: the same with `ReplicaMonitor(folder)`.
* orbit: `orbit.StandardTrainer` with loops of 50 steps in the graph.

Each row is a process of its own, in which the contestants run in turn, each with several copies. A sample of ours is
one call to `fit` with three epochs, of which the last two are timed; ratios are taken round by round. Replicas are
logical CPU devices: at several of them ours adds gradients in memory and reads the plain dataset, which the floor does
not, so these rows do not foretell the ratio on GPUs.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from cases import MODELS, Case, Classes, Job, batches_of, epoch_times, prepare_floor, run_rows, start, steps_for
from harness import Goal, Timings, print_goals, print_table, several_copies, take_turns

NUM_COPIES = 4
CONTESTANTS = ("floor", "ours", "watched")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the goal; return 1 if the goal is missed."""
    names = (*CONTESTANTS, "orbit") if importlib.util.find_spec("orbit") else CONTESTANTS
    console, values = run_rows(
        arguments,
        __file__,
        __doc__,
        names,
        measure,
        models="tiny,mlp512,cnn,lstm",
        replicas="1,2",
        rounds=12,
        seconds=1.0,
    )
    if "orbit" not in names:
        console.print("orbit is not installed", highlight=False)
    timings = {row: Timings(**value) for row, value in values.items()}
    columns = ["model", *names, *(f"{name} / floor" for name in names[1:]), "others"]
    rows = [
        [
            row,
            *(timing.spread(name).show(0, 1e6) for name in names),
            *(timing.ratio(name, "floor").show() for name in names[1:]),
            f"{timing.others_cores:.1f}",
        ]
        for row, timing in timings.items()
    ]
    title = "µs a step: median (quartiles); others: cores that other processes took meanwhile"
    print_table(console, title, columns, rows)
    ratios = {row: timing.ratio("ours", "floor").median for row, timing in timings.items()}
    goal = Goal("a TrainLoop takes at most 1.05 times what the loop by hand does", 1.05, ratios)
    print_goals(console, [goal])
    return int(bool(goal.misses))


def measure(job: Job) -> Timings:
    """Time the contestants in turn, in this process.

    Raises:
        RuntimeError: TensorFlow or a contestant could not train.
    """
    strategy = start(job.num_replicas)
    import keras

    import keras_dist_ext as kde

    case = MODELS[job.model]
    dataset = batches_of(case)
    stock = Classes(keras.Model, keras.Sequential)
    with tempfile.TemporaryDirectory() as folder:
        prepare: dict[str, Callable[[], Callable[[int], float]]] = {
            "floor": lambda: prepare_floor(stock, case, strategy, dataset),
            "ours": lambda: _prepare_ours(stock, case, strategy, dataset, []),
            "watched": lambda: _prepare_ours(stock, case, strategy, dataset, [kde.ReplicaMonitor(folder)]),
            "orbit": lambda: _prepare_orbit(stock, case, strategy, dataset),
        }

        def start_one(name: str) -> Callable[[], float]:
            keras.utils.set_random_seed(0)
            train = prepare[name]()
            num_steps = steps_for(train, job.seconds, strategy)
            return lambda: train(num_steps)

        contestants = {name: functools.partial(start_one, name) for name in job.contestants}
        return take_turns(several_copies(contestants, NUM_COPIES), job.num_rounds)


def _prepare_ours(
    classes: Classes, case: Case, strategy: Any, dataset: Any, callbacks: list[Any]
) -> Callable[[int], float]:
    import keras
    import tensorflow as tf

    from keras_dist_ext.training.loop.train_loop import TrainLoop

    with strategy.scope():
        model = case.build(classes)
        model(tf.zeros((1, *case.input_shape)))
        optimizer = keras.optimizers.Adam()
    loss_of_rows = keras.losses.get(case.loss)

    def step(replica: Any, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = replica.mean_loss(loss_of_rows(y, model(x, training=True)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return {"loss": loss}

    loop = TrainLoop(step, parts={"net": model, "optimizer": optimizer}, reduce={"loss": "mean"}, strategy=strategy)
    times = epoch_times()

    def train(num_steps: int) -> float:
        half = max(1, num_steps // 2)
        loop.fit(dataset, epochs=3, steps_per_epoch=half, verbose=0, callbacks=[*callbacks, times], shuffle=False)
        return (times.ends[-1] - times.ends[0]) / (2 * half)

    return train


def _prepare_orbit(classes: Classes, case: Case, strategy: Any, dataset: Any) -> Callable[[int], float]:
    import keras
    import orbit
    import tensorflow as tf

    with strategy.scope():
        model = case.build(classes)
        model(tf.zeros((1, *case.input_shape)))
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    loss_of_rows = keras.losses.get(case.loss)

    class Trainer(orbit.StandardTrainer):  # type: ignore[misc]
        def train_step(self, iterator: Any) -> None:
            def of_replica(x: Any, y: Any) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(loss_of_rows(y, model(x, training=True))) / case.batch_size
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

            strategy.run(of_replica, args=next(iterator))

    trainer = Trainer(strategy.experimental_distribute_dataset(dataset))

    def train(num_steps: int) -> float:
        began = time.perf_counter()
        for begin in range(0, num_steps, 50):
            trainer.train(tf.constant(min(50, num_steps - begin)))
        return (time.perf_counter() - began) / num_steps

    return train


if __name__ == "__main__":
    sys.exit(main())
