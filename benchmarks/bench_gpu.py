"""Compare `fit` on a GPU: stock Keras, keras_dist_ext, and a loop by hand over steps that XLA has compiled.

    python benchmarks/bench_gpu.py                       # at most 4 minutes on one card, with 16 cores
    python benchmarks/bench_gpu.py --rows "tiny x1" --json gpu.json
    python benchmarks/bench_gpu.py --device CPU          # to try the script where there is no GPU

Contestants, on the same batch again and again:

* stock, stock 30: `keras.Model.fit` as it comes, and with `steps_per_execution=30` (without a strategy alone: stock
  Keras dies with several steps an execution under a strategy).
* ours, watched: `kde.Model.fit` as it comes, and with a `ReplicaMonitor`, which may take 3% or 30 us a step more.
* no xla: ours with `jit_compile=False`, where it would choose XLA under a strategy.
* packs: ours without XLA, under `pick_strategy(bytes_per_pack=2**18)`, where gradients are summed while others are
  still computed.
* late, keras update: ours with batches that are split and sent in their step, and with updates as Keras wrote them,
  instead of one step ahead, and by fused ops.
* loop: a `tf.function` compiled by XLA that is called once a step, with batches that are on the device already; no
  metrics, no callbacks, no logs. On one device alone.

Each contestant is a process of its own. They compile a few at a time, since XLA and cuDNN time on the card what they
choose from, and then train in turn, row by row; a sample is one `fit` of three epochs, of which the first is not timed.
Ratios are taken round by round. ResNet50 compiles while other rows are timed, and is timed last. Two replicas are
virtual GPUs of one card where there is one. A contestant that has not compiled in time is left out, and said to be.
Rows are printed, and written to the file of `--json`, as they come.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cases import MODELS, Case, Classes, Train, batches_of, epoch_times
from harness import Timings, describe_machine, take_turns
from rich.console import Console
from rich.table import Table

__all__ = ["main"]

NUM_EPOCHS = 3
SLOW_TO_COMPILE = ("resnet50 x1",)
AT_ONCE = 6  # compile
WATCHING_SECONDS = 30e-6  # that it may add to a step, where that is more than its ratio allows
GOALS = {
    "ours / stock": {"tiny x1": 0.5, "cnn256 x1": 0.5, "": 1.0},
    "watched / ours": {"": 1.03},
    "ours / loop": {"": 1.25},
    "ours / late": {"": 1.0},
    "ours / keras update": {"": 1.0},
    "packs / no xla": {"": 1.0},
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
ROWS = {
    "tiny x1": ("stock", "ours", "watched", "loop", "stock 30"),
    "cnn256 x1": ("stock", "ours", "watched", "loop", "stock 30"),
    "lstm256 x1": ("stock", "ours", "watched"),  # XLA cannot compile cuDNN's LSTM
    "resnet50 x1": ("stock", "ours", "watched"),
    "tiny x2": ("stock", "ours", "watched", "no xla"),
    "cnn256 x2": ("stock", "ours", "watched", "no xla", "packs", "late", "keras update"),
    "lstm256 x2": ("stock", "ours", "watched"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a contestant failed or had no time, else 0, whether or not the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}, with commas between")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each contestant")
    parser.add_argument("--seconds", type=float, default=0.5, help="of timed training of one sample")
    parser.add_argument("--device", default="GPU", choices=["GPU", "CPU"])
    parser.add_argument("--limit", type=float, default=225, help="seconds for all rows")
    parser.add_argument("--json", type=pathlib.Path, help="a file for all samples")
    parser.add_argument("--contestant", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.contestant:
        serve(*options.contestant, options.seconds, options.device)
        os._exit(0)  # an iterator over several devices may wait for ever when it is deleted
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(str(describe_machine()), highlight=False)
    rows, began = options.rows.split(","), time.monotonic()
    rows.sort(key=lambda row: row in SLOW_TO_COMPILE)
    ends = began + options.limit
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        contestants = {
            (row, name): stack.enter_context(Contestant(row, name, options.seconds, options.device, folder))
            for row in reversed(rows)
            for name in ROWS[row]
        }
        pool = stack.enter_context(ThreadPoolExecutor(AT_ONCE))
        deadlines = {row: ends - (0.08 if row in SLOW_TO_COMPILE else 0.4) * options.limit for row in rows}
        compiling = {key: pool.submit(one.compile, deadlines[key[0]]) for key, one in contestants.items()}
        for (row, _), future in compiling.items():
            if row not in SLOW_TO_COMPILE:
                future.result()
        found: dict[str, Timings] = {}
        for index, row in enumerate(rows):
            for name in ROWS[row]:
                if problem := compiling[row, name].result():
                    console.print(f"{row}, {name}: {problem}", style="red", markup=False, highlight=False)
            ready = {name: one.sample for (of, name), one in contestants.items() if of == row and one.is_ready}
            of_row = time.monotonic() + (ends - time.monotonic()) / (len(rows) - index)
            if ready:
                found[row] = take_turns(
                    ready, options.rounds, goes_on=lambda _, of_row=of_row: time.monotonic() < of_row
                )
                show(console, {row: found[row]})
            if options.json:
                options.json.write_text(json.dumps({of: dataclasses.asdict(timings) for of, timings in found.items()}))
        return int(not all(contestant.is_ready for contestant in contestants.values()))


class Contestant:
    """A process that compiles one contestant of a row, and trains when it is asked to."""

    def __init__(self, row: str, name: str, seconds: float, device: str, folder: str) -> None:
        self._output = pathlib.Path(folder, f"{row} {name}.txt")
        command = [sys.executable, __file__, "--contestant", row, name, "--seconds", str(seconds), "--device", device]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True, start_new_session=True
            )
        self.is_ready = False

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def compile(self, deadline: float) -> str | None:
        """Have it compile, and wait for that; say what went wrong, if anything did."""
        assert self._process.stdout is not None
        self._go()
        seconds = max(0.0, deadline - time.monotonic())
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self.__exit__()
            return "was not compiled in time"
        self.is_ready = self._process.stdout.readline() == "ready\n"
        return None if self.is_ready else "\n".join(self._output.read_text(errors="replace").splitlines()[-15:])

    def sample(self) -> float:
        """Train, and return the seconds a step."""
        assert self._process.stdout is not None
        self._go()
        return float(self._process.stdout.readline())

    def _go(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # what it says of its end is read
            self._process.stdin.write("\n")
            self._process.stdin.flush()


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
                is_met = ratio.median <= goal
                if pair == "watched / ours":
                    added = timings.added(ours, other)
                    ratios.append(f"watching adds {added.show(0, 1e6)} us")
                    is_met = is_met or added.middle <= WATCHING_SECONDS
                ratios.append(f"{pair} {ratio.show(2)}; {goal}{'' if is_met else ' missed'}")
        table.add_row(row, "\n".join(steps), "\n".join(ratios))
    console.print(table)


def serve(row: str, contestant: str, seconds: float, device: str) -> None:
    """Compile a contestant at the first line of input, train at each of the others, and say the seconds a step."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print goes elsewhere
    name, _, replicas = row.partition(" x")
    num_replicas, case = int(replicas), CASES[name]
    strategy = start(device, num_replicas, bytes_per_pack=2**18 if contestant == "packs" else 0)
    build: dict[str, Callable[[], Sample]] = {
        "stock": lambda: by_fit(case, strategy, "keras", seconds),
        "stock 30": lambda: by_fit(case, strategy, "keras", seconds, steps_per_execution=30),
        "ours": lambda: by_fit(case, strategy, "ours", seconds),
        "watched": lambda: by_fit(case, strategy, "ours", seconds, is_watched=True),
        "no xla": lambda: by_fit(case, strategy, "ours", seconds, jit_compile=False),
        "packs": lambda: by_fit(case, strategy, "ours", seconds, jit_compile=False),
        "late": lambda: late(lambda: by_fit(case, strategy, "ours", seconds)),
        "keras update": lambda: with_keras_updates(lambda: by_fit(case, strategy, "ours", seconds)),
        "loop": lambda: by_hand(case, seconds),
    }
    sys.stdin.readline()
    sample = build[contestant]()
    answers.write("ready\n")
    for _ in sys.stdin:
        answers.write(f"{sample()}\n")


Sample = Callable[[], float]


def late(build: Callable[[], Sample]) -> Sample:
    """Build a contestant that gets its batches in their step."""
    from keras_dist_ext.training import batch_devices

    batch_devices.LEAST_BYTES = 2**62
    return build()


def with_keras_updates(build: Callable[[], Sample]) -> Sample:
    """Build a contestant whose optimizer updates as Keras wrote it."""
    from keras_dist_ext.step import fused_updates

    fused_updates.KERAS_UPDATES.clear()
    return build()


def start(device: str, num_replicas: int, bytes_per_pack: int = 0) -> Any:
    """Start TensorFlow with so many devices, virtual ones where there is one card, and return the strategy."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # the contestants share the card
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf

    cards = tf.config.list_physical_devices(device)
    if not cards:
        raise RuntimeError(f"TensorFlow sees no {device} here.")
    if len(cards) < num_replicas:
        limit = {"memory_limit": 3072} if device == "GPU" else {}
        virtual = [tf.config.LogicalDeviceConfiguration(**limit) for _ in range(num_replicas)]
        tf.config.set_logical_device_configuration(cards[0], virtual)
    if num_replicas == 1:
        return tf.distribute.get_strategy()
    devices = [f"{device}:{index}" for index in range(num_replicas)]
    if bytes_per_pack and device == "GPU":
        import keras_dist_ext as kde

        return kde.pick_strategy("mirrored", devices=devices, bytes_per_pack=bytes_per_pack, environ={}).strategy
    return tf.distribute.MirroredStrategy(devices)


def by_fit(
    case: Case, strategy: Any, library: str, seconds: float, *, is_watched: bool = False, **compiled: Any
) -> Sample:
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


def by_hand(case: Case, seconds: float) -> Sample:
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


def sized(train: Train, seconds: float) -> Sample:
    """Compile, and let a sample be as many steps as take so long."""
    train(30)
    num_steps = max(30, round(seconds / train(60) / 30) * 30)
    return functools.partial(train, num_steps)


if __name__ == "__main__":
    sys.exit(main())
