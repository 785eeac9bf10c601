"""What the benchmarks train, on what devices, and the loop by hand that they are held against."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from harness import describe_machine, run_apart
from rich.console import Console

__all__ = [
    "MODELS",
    "Case",
    "Classes",
    "Job",
    "Train",
    "batches_of",
    "epoch_times",
    "prepare_floor",
    "run_rows",
    "start",
    "steps_for",
]

# Trains this many steps and returns its seconds a step.
Train = Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures; travels as JSON on its command line."""

    model: str
    num_replicas: int  # per worker; 1 = no strategy, unless there are several workers
    contestants: tuple[str, ...]
    num_workers: int = 1
    num_rounds: int = 7
    seconds: float = 0.7  # timed training of one sample
    memory: bool = False  # measure the memory of the only contestant instead of speed

    @property
    def row(self) -> str:
        """The name of the row in tables and goals."""
        if self.num_workers > 1:
            return f"{self.model} x{self.num_replicas} on {self.num_workers} workers"
        return f"{self.model} x{self.num_replicas}"


def run_rows(
    arguments: Sequence[str] | None,
    file: str,
    doc: str | None,
    contestants: Sequence[str],
    measure: Callable[[Job], Any],
    tell: Callable[[Any], str] = lambda value: "",
    **defaults: Any,
) -> tuple[Console, dict[str, Any]]:
    """Measure each row, a model at a number of replicas, in a process of its own; return what they measured.

    Such a process runs `file` with another option, writes what `measure` returns as JSON, and exits here.

    Args:
        arguments: Of the command line; None for this process'.
        file: The script, and `doc` its docstring.
        doc: What `--help` prints.
        contestants: Names of what is measured, for `Job.contestants`.
        measure: Called in each row's process.
        tell: What to print of a row when it is measured: others may take long, or fail.
        defaults: `models` and `replicas` with commas between, `rounds`, `seconds`.

    Raises:
        RuntimeError: A row's process failed or took too long.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=defaults["models"], help=f"of {', '.join(MODELS)}, with commas between")
    parser.add_argument("--replicas", default=defaults["replicas"])
    parser.add_argument("--rounds", type=int, default=defaults["rounds"], help="samples of each contestant")
    parser.add_argument("--seconds", type=float, default=defaults["seconds"], help="of timed training of one sample")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        value = measure(Job(**json.loads(options.job)))
        options.result.write_text(json.dumps(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value))
        os._exit(
            0
        )  # the floor's iterators may wait for ever when they are deleted (MultiDeviceIterator, TensorFlow 2.21)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(str(describe_machine()), highlight=False)
    values = {}
    for model in options.models.split(","):
        for num_replicas in map(int, options.replicas.split(",")):
            job = Job(model, num_replicas, tuple(contestants), num_rounds=options.rounds, seconds=options.seconds)
            console.print(f"[dim]{job.row}[/]", end=" ")
            command = [sys.executable, file, "--job", json.dumps(dataclasses.asdict(job))]
            values[job.row] = run_apart(command, 240 + 60 * job.num_rounds * len(contestants) * job.seconds)
            console.print(f"[dim]{tell(values[job.row])}[/]", highlight=False)
    return console, values


class Classes(NamedTuple):
    """Where a contestant takes its model classes from."""

    model: Any
    sequential: Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batch. The three ways to write a model are all there."""

    build: Callable[[Classes], Any]
    input_shape: tuple[int, ...]
    num_classes: int  # 0 = one real target
    batch_size: int  # of the global batch, whatever the number of replicas
    memory_steps: int  # steps of an epoch when memory is measured; about a second of stock fit
    compile_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> str:
        """The Keras name of the loss."""
        return "sparse_categorical_crossentropy" if self.num_classes else "mean_squared_error"


def _tiny(classes: Classes) -> Any:
    from keras import layers

    return classes.sequential([layers.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(1)])


def _mlp512(classes: Classes) -> Any:
    from keras import layers

    return classes.sequential(
        [
            layers.Input((784,)),
            layers.Dense(512, activation="relu"),
            layers.Dense(512, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def _cnn(classes: Classes) -> Any:
    from keras import layers

    pixels = hidden = layers.Input((28, 28, 1))
    for num_filters in (16, 32):
        hidden = layers.Conv2D(num_filters, 3, activation="relu")(hidden)
        hidden = layers.MaxPooling2D()(hidden)
    return classes.model(pixels, layers.Dense(10, activation="softmax")(layers.Flatten()(hidden)))


def _strided(classes: Classes) -> Any:
    """A CNN whose steps take over 5 ms, without pooling.

    In a graph with a loop TensorFlow 2.21 gives the gradient of max pooling one of two kernels on CPUs, by chance:
    oneDNN's, or its own, which takes ten times as long. Two copies of a program with pooling may differ by a fifth.
    """
    from keras import layers

    return classes.sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )


def _lstm(classes: Classes) -> Any:
    from keras import layers

    base: Any = classes.model

    class Reader(base):  # type: ignore[misc]  # a base class of any type
        def __init__(self) -> None:
            super().__init__()
            self.lstm = layers.LSTM(32)
            self.head = layers.Dense(10, activation="softmax")

        def call(self, inputs: Any) -> Any:
            return self.head(self.lstm(inputs))

    return Reader()


MODELS = {
    "tiny": Case(_tiny, (8,), num_classes=0, batch_size=32, memory_steps=500),
    "single": Case(_tiny, (8,), 0, 32, memory_steps=500, compile_options={"steps_per_execution": 1}),
    "mlp512": Case(_mlp512, (784,), num_classes=10, batch_size=128, memory_steps=100),
    "cnn": Case(_cnn, (28, 28, 1), num_classes=10, batch_size=64, memory_steps=100),
    "strided": Case(_strided, (28, 28, 1), num_classes=10, batch_size=1024, memory_steps=20),
    "lstm": Case(_lstm, (24, 16), num_classes=10, batch_size=32, memory_steps=100),
}


def start(num_replicas: int, num_workers: int = 1) -> Any:
    """Start TensorFlow with so many devices and return the strategy over them."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * num_replicas)
    if num_workers > 1:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if num_replicas == 1:
        return tf.distribute.get_strategy()
    return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(num_replicas)])


def batches_of(case: Case) -> Any:
    """Return a dataset that gives one global batch of made-up numbers, again and again.

    There is nothing to tune in it, and the thread that would do so may be waited for by whoever drops an iterator, for
    up to a minute (`keras_dist_ext.data.iterators.release_iterator`).
    """
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=(case.batch_size, *case.input_shape)).astype("float32")
    if case.num_classes:
        y = random.integers(case.num_classes, size=case.batch_size).astype("int32")
    else:
        y = random.normal(size=(case.batch_size, 1)).astype("float32")
    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensors((x, y)).repeat().with_options(options)


def epoch_times() -> Any:
    """Return a callback with the times at which epochs began and ended, in `begins` and `ends`.

    It has no batch hooks, which would keep `steps_per_execution="auto"` at one step an execution.
    """
    import keras

    class EpochTimes(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_train_begin(self, logs: Any = None) -> None:
            self.begins: list[float] = []
            self.ends: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begins.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    return EpochTimes()


def steps_for(train: Train, seconds: float, strategy: Any) -> int:
    """Compile and warm up, then return how many steps take about `seconds`: the same number on all workers."""
    import tensorflow as tf

    train(2)
    num_steps = 8
    while True:
        mine = tf.constant(train(num_steps))
        step_seconds = float(strategy.reduce("MEAN", strategy.run(tf.identity, args=(mine,)), axis=None))
        if num_steps * step_seconds >= seconds / 4:
            return max(2, round(seconds / step_seconds))
        num_steps *= 4


_KEPT: list[Any] = []  # iterators, until the process ends


def prepare_floor(classes: Classes, case: Case, strategy: Any, dataset: Any) -> Train:
    """Return the loop that someone who knows tf.distribute would write by hand, without any extras."""
    import keras
    import tensorflow as tf

    with strategy.scope():
        model = case.build(classes)
        model(tf.zeros((1, *case.input_shape)))
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    loss_of_rows = keras.losses.get(case.loss)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    _KEPT.append(iterator)
    parts = strategy.experimental_local_results(next(iterator)[0])
    rows = sum(len(part) for part in parts) * strategy.num_replicas_in_sync // len(parts)
    if rows != case.batch_size:
        raise ValueError(f"the loop has {rows} rows a step, and others {case.batch_size}")

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of_rows(y, model(x, training=True))) / case.batch_size
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def steps(iterator: Any, num_steps: Any) -> None:
        for _ in tf.range(num_steps):
            strategy.run(step, args=next(iterator))

    def train(num_steps: int) -> float:
        count = tf.constant(num_steps)
        began = time.perf_counter()
        steps(iterator, count)
        return (time.perf_counter() - began) / num_steps

    return train
