"""Compare `fit` on a GPU: stock Keras, keras_dist_ext, and a loop by hand over steps that XLA has compiled.

    python benchmarks/bench_gpu.py                       # at most 4 minutes on one card
    python benchmarks/bench_gpu.py --rows "tiny x1" --json gpu.json
    python benchmarks/bench_gpu.py --device CPU          # to try the script where there is no GPU

Contestants, on the same batch again and again:

* stock, stock 30: `keras.Model.fit` as it comes, and with `steps_per_execution=30` (without a strategy alone: stock
  Keras dies with several steps an execution under a strategy).
* ours, watched, jit: `kde.Model.fit` as it comes, with a `ReplicaMonitor`, and with `jit_compile=True`.
* loop: a `tf.function` compiled by XLA that is called once a step, with batches that are on the device already; no
  metrics, no callbacks, no logs. On one device alone.

Each row is a process of its own, in which the contestants run in turn; a sample is one `fit` of three epochs, of which
the first is not timed. Ratios are taken round by round. Two replicas are virtual GPUs of one card where there is one.
Each row has a share of the time: what has none left is not built, or has fewer samples. Rows are printed, and
written to the file of `--json`, as they come.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from cases import MODELS, Case, Classes, Train, batches_of, epoch_times
from harness import Timings, describe_machine, run_apart, take_turns
from rich.console import Console
from rich.table import Table

__all__ = ["main"]

NUM_EPOCHS = 3
SHARES = {"resnet50 x1": 4.0, "cnn256 x1": 1.6}  # of the time, where a row needs more than others
GOALS = {
    "ours / stock": {"tiny x1": 0.5, "cnn256 x1": 0.5, "": 1.0},
    "watched / ours": {"": 1.03},
    "ours / loop": {"": 1.25},
}


def _cnn256(classes: Classes) -> Any:
    from keras import layers

    pixels = hidden = layers.Input((32, 32, 3))
    for num_filters in (32, 64, 64):
        hidden = layers.Conv2D(num_filters, 3, padding="same", activation="relu")(hidden)
        hidden = layers.MaxPooling2D()(hidden)
    return classes.model(pixels, layers.Dense(10, activation="softmax")(layers.Flatten()(hidden)))


def _lstm256(classes: Classes) -> Any:
    from keras import layers

    return classes.sequential(
        [
            layers.Input((64, 64)),
            layers.LSTM(256, return_sequences=True),
            layers.LSTM(256),
            layers.Dense(10, activation="softmax"),
        ]
    )


def _resnet50(classes: Classes) -> Any:
    import keras

    keras.mixed_precision.set_global_policy("mixed_float16")
    base = keras.applications.ResNet50(weights=None, input_shape=(128, 128, 3), pooling="avg", include_top=False)
    outputs = keras.layers.Dense(10, activation="softmax", dtype="float32")(base.output)
    return classes.model(base.input, outputs)


CASES = {
    "tiny": MODELS["tiny"],
    "cnn256": Case(_cnn256, (32, 32, 3), num_classes=10, batch_size=256, memory_steps=0),
    "lstm256": Case(_lstm256, (64, 64), num_classes=10, batch_size=128, memory_steps=0),
    "resnet50": Case(_resnet50, (128, 128, 3), num_classes=10, batch_size=64, memory_steps=0),
}
# What has a goal comes first: a row that compiles for long has no time for the others.
ROWS = {
    "tiny x1": ("stock", "ours", "watched", "loop", "stock 30", "jit"),
    "cnn256 x1": ("stock", "ours", "watched", "loop", "stock 30", "jit"),
    "lstm256 x1": ("stock", "ours", "watched"),  # XLA cannot compile cuDNN's LSTM
    "tiny x2": ("stock", "ours", "watched", "jit"),
    "cnn256 x2": ("stock", "ours", "watched", "jit"),
    "resnet50 x1": ("stock", "ours", "watched"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a row failed, else 0, whether or not the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}, with commas between")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each contestant")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timed training of one sample")
    parser.add_argument("--device", default="GPU", choices=["GPU", "CPU"])
    parser.add_argument("--limit", type=float, default=230, help="seconds for all rows")
    parser.add_argument("--json", type=pathlib.Path, help="a file for all samples")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.row:
        measure(options.row, options.rounds, options.seconds, options.device, options.limit, options.result)
        os._exit(0)  # an iterator over several devices may wait for ever when it is deleted
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(str(describe_machine()), highlight=False)
    found: dict[str, Timings] = {}
    rows, ends = options.rows.split(","), time.monotonic() + options.limit
    for index, row in enumerate(rows):
        share = SHARES.get(row, 1.0) / sum(SHARES.get(other, 1.0) for other in rows[index:])
        limit = (ends - time.monotonic()) * share
        command = [sys.executable, __file__, "--row", row, "--rounds", str(options.rounds)]
        command += ["--seconds", str(options.seconds), "--device", options.device, "--limit", str(limit - 3)]
        try:
            found[row] = Timings(**run_apart(command, limit))
            show(console, {row: found[row]})
        except RuntimeError as error:
            console.print(f"{row} failed: {error}", style="red", markup=False, highlight=False)
        if options.json:
            options.json.write_text(json.dumps({row: dataclasses.asdict(timings) for row, timings in found.items()}))
    return int(len(found) < len(rows))


def show(console: Console, found: dict[str, Timings]) -> None:
    """Print microseconds a step, and the ratios that have a goal."""
    table = Table("row", "us a step, median (quartiles)", "ratios, median (quartiles); goal")
    for row, timings in found.items():
        steps = [f"{name} {timings.spread(name).show(0, 1e6)}" for name in timings.samples]
        ratios = []
        for pair, goals in GOALS.items():
            ours, other = pair.split(" / ")
            if ours in timings.samples and other in timings.samples:
                goal = goals.get(row, goals[""])
                ratio = timings.ratio(ours, other)
                ratios.append(f"{pair} {ratio.show(2)}; {goal}{'' if ratio.median <= goal else ' missed'}")
        table.add_row(row, "\n".join(steps), "\n".join(ratios))
    console.print(table)


def measure(row: str, num_rounds: int, seconds: float, device: str, limit: float, result: pathlib.Path) -> None:
    """Let a row's contestants train in turn, until time is up; write what there is after each round."""
    ends = time.monotonic() + limit
    name, _, replicas = row.partition(" x")
    num_replicas, case = int(replicas), CASES[name]
    strategy = start(device, num_replicas)
    build: dict[str, Callable[[], Callable[[], float]]] = {
        "stock": lambda: by_fit(case, strategy, "keras", seconds),
        "stock 30": lambda: by_fit(case, strategy, "keras", seconds, steps_per_execution=30),
        "ours": lambda: by_fit(case, strategy, "ours", seconds),
        "watched": lambda: by_fit(case, strategy, "ours", seconds, is_watched=True),
        "jit": lambda: by_fit(case, strategy, "ours", seconds, jit_compile=True),
        "loop": lambda: by_hand(case, seconds),
    }

    def goes_on(timings: Timings) -> bool:
        unfinished = result.with_suffix(".part")
        unfinished.write_text(json.dumps(dataclasses.asdict(timings)))
        unfinished.replace(result)
        return time.monotonic() < ends - (time.monotonic() - began) / len(timings.samples["stock"])

    trials: dict[str, Callable[[], float]] = {}
    for contestant in ROWS[row]:
        if time.monotonic() < ends - 0.4 * limit or len(trials) < 2:
            trials[contestant] = build[contestant]()
        else:
            print(f"{row}: no time for {contestant}")
    began = time.monotonic()
    take_turns(trials, num_rounds=num_rounds, goes_on=goes_on)


def start(device: str, num_replicas: int) -> Any:
    """Start TensorFlow with so many devices, virtual ones where there is one card, and return the strategy."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    cards = tf.config.list_physical_devices(device)
    if not cards:
        raise RuntimeError(f"TensorFlow sees no {device} here.")
    if len(cards) < num_replicas:
        limit = {"memory_limit": 16384} if device == "GPU" else {}
        virtual = [tf.config.LogicalDeviceConfiguration(**limit) for _ in range(num_replicas)]
        tf.config.set_logical_device_configuration(cards[0], virtual)
    if num_replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"{device}:{index}" for index in range(num_replicas)])


def by_fit(
    case: Case, strategy: Any, library: str, seconds: float, *, is_watched: bool = False, **compiled: Any
) -> Callable[[], float]:
    """Return `fit` of a model; it says its seconds a step."""
    import keras

    import keras_dist_ext as kde

    classes = Classes(keras.Model, keras.Sequential) if library == "keras" else Classes(kde.Model, kde.Sequential)
    with strategy.scope():
        model = case.build(classes)
        model.compile("adam", case.loss, **compiled)
    keras.mixed_precision.set_global_policy("float32")
    data = batches_of(case).prefetch(4)

    def train(num_steps: int) -> float:
        times = epoch_times()
        callbacks = [times, kde.ReplicaMonitor(writers=[kde.MemoryWriter()])] if is_watched else [times]
        model.fit(data, epochs=NUM_EPOCHS, steps_per_epoch=num_steps, verbose=0, callbacks=callbacks)
        return float(times.ends[-1] - times.begins[1]) / (num_steps * (NUM_EPOCHS - 1))

    return sized(train, seconds / (NUM_EPOCHS - 1))


def by_hand(case: Case, seconds: float) -> Callable[[], float]:
    """Return a loop over a compiled step, with batches that are on the device before they are needed."""
    import keras
    import tensorflow as tf

    model = case.build(Classes(keras.Model, keras.Sequential))
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    loss_of_rows = keras.losses.get(case.loss)
    device = tf.config.list_logical_devices("GPU")[:1]
    data = batches_of(case).prefetch(4)
    if device:
        data = data.apply(tf.data.experimental.prefetch_to_device(device[0].name, buffer_size=2))
    iterator = iter(data)

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of_rows(y, model(x, training=True)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    def train(num_steps: int) -> float:
        began = time.perf_counter()
        for _ in range(num_steps):
            loss = step(*next(iterator))
        loss.numpy()
        return (time.perf_counter() - began) / num_steps

    return sized(train, seconds)


def sized(train: Train, seconds: float) -> Callable[[], float]:
    """Compile, and let a sample be as many steps as take so long."""
    train(30)
    num_steps = max(30, round(seconds / train(60) / 30) * 30)
    return functools.partial(train, num_steps)


if __name__ == "__main__":
    sys.exit(main())
