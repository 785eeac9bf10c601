"""Train a small CNN on handwritten digits under several replicas, and show what each of them did.

    keras-dist-ext demo                                                # two replicas in this process, or all GPUs
    keras-dist-ext demo --workers 2                                    # two processes
    keras-dist-ext launch --workers 2 python -m keras_dist_ext.examples.digits    # the same, started by hand

What makes it run on several replicas is the strategy, its scope, and `kde` in front of `Sequential`. The rest is Keras.
"""

import argparse
import os
import shlex
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow starts: what it says about GPUs is not asked for

import numpy as np
import tensorflow as tf
from rich import box
from rich.console import Console
from rich.table import Table

import keras_dist_ext as kde
from keras_dist_ext._keras import keras
from keras_dist_ext.aliases import Logs
from keras_dist_ext.examples.demo_options import add_options, given_options
from keras_dist_ext.monitoring.terminal import TerminalWriter
from keras_dist_ext.step.stats import ReplicaStats
from keras_dist_ext.strategy.decision import decide
from keras_dist_ext.strategy.resources import find_resources
from keras_dist_ext.strategy.workers import workers_of

__all__ = ["main"]

BATCH_SIZE = 64  # of all replicas together
EPOCHS = 12


def main(
    *,
    num_replicas: int | None = None,
    num_workers: int = 1,
    epochs: int = EPOCHS,
    log_dir: str | os.PathLike[str] | None = None,
    console: Console | None = None,
) -> int:
    """Train, evaluate and report; or start several workers of which each does.

    Args:
        num_replicas: replicas in this process; by default one for each GPU, and two where there is none.
        num_workers: processes; each has a replica for each GPU, or one.
        epochs: passes over the training data.
        log_dir: where TensorBoard's events go; by default a new folder in `logs`.
        console: where to print; by default stdout.

    Returns:
        The exit code.

    Raises:
        StrategyError: there are fewer devices than `num_replicas`, or both it and `num_workers` are given.
        KerasDistError: `log_dir` cannot be written.
    """
    log_dir = Path(log_dir or time.strftime("logs/digits-%Y%m%d-%H%M%S"))
    if num_workers > 1:
        return start_workers(num_replicas, num_workers, epochs, log_dir)
    train(num_replicas, epochs, log_dir, console or Console(highlight=False))
    return 0


def train(num_replicas: int | None, epochs: int, log_dir: Path, console: Console) -> None:
    """Do what a training script does, and print what came out on the chief."""
    choice = pick_strategy(num_replicas)
    strategy = choice.strategy
    workers = workers_of(strategy)  # None: this process trains by itself
    is_chief = workers is None or workers.is_chief
    if is_chief:
        make_folder(log_dir)
        console.print(f"strategy  {choice}", markup=False, soft_wrap=True)

    keras.utils.set_random_seed(1)
    x_train, x_test, y_train, y_test = digits()

    with strategy.scope():
        model = kde.Sequential(
            [
                keras.layers.Input((8, 8, 1)),
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.Conv2D(64, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])

    memory = kde.MemoryWriter()  # keeps what the table in the end is made of
    live = [TerminalWriter(console)] if console.is_terminal else []  # a table that is drawn anew while it trains
    model.fit(
        x_train,
        y_train,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        validation_data=(x_test, y_test),
        callbacks=[
            kde.ScopeGuard(),  # every variable lives under the strategy, or a clear error
            kde.ReplicaSeeds(1),  # every replica draws numbers of its own, the same at every run
            kde.ReplicaMonitor(log_dir, update_freq=5, writers=[memory, *live]),
            keras.callbacks.TensorBoard(log_dir),
            Epochs(console, epochs, is_shown=is_chief and not console.is_terminal),
        ],
        verbose=0,
    )
    held_out = model.evaluate(x_test, y_test, batch_size=BATCH_SIZE, verbose=0, return_dict=True)

    if is_chief:
        console.print(table_of(memory.train, devices(strategy), epochs))
        console.print(
            f"held-out digits  accuracy {held_out['accuracy']:.3f}, loss {held_out['loss']:.3f}, {len(x_test)} examples"
        )
        console.print(f"TensorBoard      {tensorboard_command(log_dir)}", markup=False, soft_wrap=True)


def pick_strategy(num_replicas: int | None) -> kde.StrategyChoice:
    """Take what there is: the workers of a cluster, a TPU, GPUs; and where there is one CPU device alone, make two."""
    if num_replicas is None and decide("auto", find_resources()).devices == ("CPU:0",):
        num_replicas = 2
    return kde.pick_strategy(num_replicas=num_replicas)


def make_folder(path: Path) -> None:
    """Make a folder now: an error after minutes of training would come late."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise kde.KerasDistError(
            f"The log directory {path} cannot be made ({error.strerror}), so TensorBoard would have nothing to show. "
            "Give one that can be written: --log-dir DIR."
        ) from error


def digits() -> list[np.ndarray[Any, Any]]:
    """Return 8 x 8 images and labels, for training and held out: a fifth of the images of each digit.

    They are the test set of E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998 (CC BY 4.0), as in scikit-learn's `load_digits`.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as data:
        images = (data["images"][..., None] / 16).astype("float32")  # of 0 ... 16
        labels = data["labels"].astype("int64")
        training, held_out = data["training"], data["held_out"]
    return [images[training], images[held_out], labels[training], labels[held_out]]


class Epochs(keras.callbacks.Callback):  # type: ignore[misc]
    """Print a line an epoch.

    Args:
        console: where to.
        epochs: how many there will be.
        is_shown: whether to show anything.
    """

    def __init__(self, console: Console, epochs: int, *, is_shown: bool) -> None:
        super().__init__()
        self.console = console
        self.is_shown = is_shown
        self.epochs = epochs

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self.is_shown and logs:
            seconds = time.perf_counter() - self.began
            self.console.print(
                f"epoch {epoch + 1:2d}/{self.epochs}  loss {logs['loss']:.3f}  accuracy {logs['accuracy']:.3f}  "
                f"held out {logs['val_accuracy']:.3f}  {seconds:.2f} s",
                soft_wrap=True,
            )


def table_of(records: list[ReplicaStats], devices: list[str], epochs: int) -> Table:
    """Draw what each replica did: its examples in an epoch, its throughput but for the first steps, its losses."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("replica")
    table.add_column("device", no_wrap=True)
    for heading in ("examples", "examples/s", "first loss", "last loss"):
        table.add_column(heading, justify="right")
    for replica, device in enumerate(devices):
        examples = sum(int(record.examples[replica]) for record in records) / epochs
        rate = statistics.median(record.examples_per_second[replica] for record in records[1:] or records)
        losses = [record.loss[replica] for record in records if record.examples[replica]]
        table.add_row(str(replica), device, f"{examples:.0f}", f"{rate:.0f}", f"{losses[0]:.3f}", f"{losses[-1]:.3f}")
    return table


def devices(strategy: tf.distribute.Strategy) -> list[str]:
    """Name the device of each replica, over all workers; every worker has the same ones."""
    local = [device.rpartition("device:")[2] for device in strategy.extended.worker_devices]
    num_workers = strategy.num_replicas_in_sync // len(local)
    return local if num_workers == 1 else [f"worker {i} {device}" for i in range(num_workers) for device in local]


def tensorboard_command(log_dir: Path) -> str:
    """Return what a shell runs to show the curves, also where the virtual environment is not activated."""
    program = ["tensorboard"] if shutil.which("tensorboard") else [sys.executable, "-m", "tensorboard.main"]
    return shlex.join([*program, "--logdir", str(log_dir)])


def start_workers(num_replicas: int | None, num_workers: int, epochs: int, log_dir: Path) -> int:
    """Run this script in several processes, which find each other through TF_CONFIG, and return the exit code."""
    if num_replicas is not None:
        raise kde.StrategyError(
            f"--replicas {num_replicas} and --workers {num_workers} were given, but a worker takes what its process "
            "finds: each of its GPUs, or else one CPU. Leave out --replicas."
        )
    options = ["--epochs", str(epochs), "--log-dir", str(log_dir)]
    script = [sys.executable, "-m", "keras_dist_ext.examples.digits", *options]
    return kde.launch(num_workers, script, threads_per_worker=max(1, (os.cpu_count() or 1) // num_workers)).exit_code


def command_line() -> int:
    """Do what the command line says, as ``keras-dist-ext demo`` does, and return the exit code."""
    parser = argparse.ArgumentParser(prog="digits", description="Train a small CNN on handwritten digits.")
    add_options(parser)
    try:
        return main(**given_options(parser.parse_args()))
    except kde.KerasDistError as error:
        print(f"digits: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(command_line())
