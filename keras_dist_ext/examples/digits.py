"""Train a small CNN on handwritten digits under several replicas, and show what each of them did.

    keras-dist-ext demo                                                # two replicas in this process, or all GPUs
    keras-dist-ext demo --workers 2                                    # two processes
    keras-dist-ext launch --workers 2 python -m keras_dist_ext.examples.digits    # the same, started by hand

What makes it run on several replicas is the strategy, its scope, and `kde` in front of `Sequential`. The rest is Keras.
"""

import os
import shlex
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow starts: what it says about GPUs is not asked for

import keras
import numpy as np
import tensorflow as tf
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_dist_ext as kde
from keras_dist_ext.decision import decide
from keras_dist_ext.facts import gather_facts
from keras_dist_ext.workers import workers_of

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
    workers = workers_of(strategy)  # None: this process trains alone
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
        replicas = range(strategy.num_replicas_in_sync)
        model.compile(
            keras.optimizers.Adam(2e-3),
            "sparse_categorical_crossentropy",
            metrics=["accuracy", *map(ReplicaLoss, replicas), *map(ReplicaExamples, replicas)],
        )

    report = Report(console, epochs, is_shown=is_chief)
    with report.bar:
        model.fit(
            x_train,
            y_train,
            batch_size=BATCH_SIZE,
            epochs=epochs,
            validation_data=(x_test, y_test),
            callbacks=[kde.ScopeGuard(), keras.callbacks.TensorBoard(log_dir), report],
            verbose=0,
        )
    held_out = model.evaluate(x_test, y_test, batch_size=BATCH_SIZE, verbose=0, return_dict=True)

    if is_chief:
        console.print(report.table(strategy))
        console.print(
            f"held-out digits  accuracy {held_out['accuracy']:.3f}, loss {held_out['loss']:.3f}, {len(x_test)} examples"
        )
        console.print(f"TensorBoard      {tensorboard_command(log_dir)}", markup=False, soft_wrap=True)


def pick_strategy(num_replicas: int | None) -> kde.StrategyChoice:
    """Take what there is: the workers of a cluster, a TPU, GPUs; and where there is one CPU device alone, make two."""
    if num_replicas is None and decide("auto", gather_facts()).devices == ("CPU:0",):
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
    """Return 8 x 8 images and labels, for training and held out, as scikit-learn brings them along."""
    data = load_digits()
    images = (data.images[..., None] / 16).astype("float32")
    split = train_test_split(images, data.target, test_size=0.2, stratify=data.target, random_state=1)
    return list(split)


# What each replica did. Metrics run on every replica and add up over all of them: one in which only the rows of one
# replica count tells about that replica, in the History and in TensorBoard too.


class ReplicaLoss(keras.metrics.Mean):  # type: ignore[misc]
    """The mean loss of the examples that one replica got."""

    def __init__(self, replica: int) -> None:
        super().__init__(name=f"replica_{replica}_loss")
        self.replica = replica

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        losses = keras.losses.sparse_categorical_crossentropy(y_true, y_pred)
        super().update_state(losses, weights_on(self.replica, losses))


class ReplicaExamples(keras.metrics.Sum):  # type: ignore[misc]
    """The number of examples that one replica got."""

    def __init__(self, replica: int) -> None:
        super().__init__(name=f"replica_{replica}_examples")
        self.replica = replica

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(weights_on(self.replica, y_true))


def weights_on(replica: int, rows: Any) -> tf.Tensor:
    """Return a weight for each row: 1 on this replica, 0 on all others."""
    context = tf.distribute.get_replica_context()
    here = context.replica_id_in_sync_group if context else 0  # Keras builds metrics outside of all replicas
    return tf.fill([tf.shape(rows)[0]], tf.cast(tf.equal(here, replica), tf.float32))


class Report(keras.callbacks.Callback):  # type: ignore[misc]
    """Show how training goes, and remember what the table of replicas is made of.

    Args:
        console: where to show it: a bar on a terminal, else a line an epoch.
        epochs: how many there will be.
        is_shown: whether to show anything.
    """

    def __init__(self, console: Console, epochs: int, *, is_shown: bool) -> None:
        super().__init__()
        self.console = console
        self.is_shown = is_shown
        self.epochs = epochs
        self.logs: list[dict[str, float]] = []
        self.seconds: list[float] = []  # of training in each epoch, without validation
        self.bar = Progress(
            "{task.description}",
            BarColumn(16),
            console=console,
            transient=True,
            disable=not (is_shown and console.is_terminal),
        )
        self.task = self.bar.add_task("tracing the first step", total=epochs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.began = time.perf_counter()

    def on_test_begin(self, logs: Any = None) -> None:
        self.seconds.append(time.perf_counter() - self.began)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(logs)
        text = (
            f"epoch {epoch + 1:2d}/{self.epochs}  loss {logs['loss']:.3f}  accuracy {logs['accuracy']:.3f}  "
            f"held out {logs['val_accuracy']:.3f}  {self.seconds[epoch]:.2f} s"
        )
        self.bar.update(self.task, advance=1, description=text)
        if self.is_shown and not self.console.is_terminal:
            self.console.print(text, soft_wrap=True)

    def table(self, strategy: tf.distribute.Strategy) -> Table:
        """Draw what each replica did in an epoch.

        Replicas are in step, so each one's throughput is its examples by the time of all: here that of a median epoch
        after the first, which includes tracing.
        """
        seconds = statistics.median(self.seconds[1:] or self.seconds)
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("replica")
        table.add_column("device", no_wrap=True)
        for heading in ("examples", "examples/s", "first loss", "last loss"):
            table.add_column(heading, justify="right")
        for replica, device in enumerate(devices(strategy)):
            first, last = (self.logs[epoch][f"replica_{replica}_loss"] for epoch in (0, -1))
            examples = self.logs[-1][f"replica_{replica}_examples"]
            row = (str(replica), device, f"{examples:.0f}", f"{examples / seconds:.0f}", f"{first:.3f}", f"{last:.3f}")
            table.add_row(*row)
        return table


def devices(strategy: tf.distribute.Strategy) -> list[str]:
    """Name the device of each replica, over all workers; every worker has the same ones."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return ["any worker"]  # each takes a batch when it is free, so to the model they are one replica
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


if __name__ == "__main__":
    from keras_dist_ext.cli import main as command_line

    sys.exit(command_line(["demo", *sys.argv[1:]]))
