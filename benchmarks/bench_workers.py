"""Compare training on two worker processes: ours, tf_keras, a loop by hand, and torch's DDP where torch is installed.

    python benchmarks/bench_workers.py                       # about 14 minutes
    python benchmarks/bench_workers.py --rows tiny --rounds 3
    pip install torch tf_keras                               # for all contestants

Each contestant is two processes on 127.0.0.1, a core each (pinned, one thread), that train the same model with Adam
on 64 examples a worker, again and again, and take turns with the others: while one trains, the others wait.

* ours, watched, seeded, ours16, buckets: `kde.Model.fit`, also with a `ReplicaMonitor`, with `ReplicaSeeds`, compiled
  with `gradient_compression="bfloat16"`, and under `pick_strategy(bytes_per_pack=2**20)`, where gradients are summed a
  mebibyte at a time while others are still computed, instead of all at once.
* tf_keras: `tf_keras.Model.fit`; stock Keras 3 has no training on several workers.
* loop: a `tf.function` over `strategy.run(step)` with `tf.range`; no metrics, callbacks or logs.
* torch: a loop over `DistributedDataParallel` with gloo; no metrics.

A sample is seconds a step in an epoch, after one that is not timed; ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cases import Case, Classes, Train, batches_of, epoch_times, prepare_floor
from harness import Timings, describe_machine, print_table, take_turns
from rich.console import Console

__all__ = ["main"]

NUM_WORKERS = 2
ROWS_OF_WORKER = 64
CONTESTANTS = ("ours", "watched", "seeded", "ours16", "buckets", "tf_keras", "loop", "torch")
GOALS = {
    "ours / torch": {"tiny": 1.0, "cnn1m": 1.0, "lstm": 1.4, "": 1.6},
    "ours16 / torch": {"mlp1m": 1.3, "mlp20m": 1.3, "": 1.6},
    "ours16 / ours": {"": 1.0},
    "buckets / ours": {"": 1.0},
    "ours / tf_keras": {"": 0.5},
    "ours / loop": {"": 1.0},
    "watched / ours": {"": 1.03},
}
START_SECONDS, SAMPLE_SECONDS = 180, 120


@dataclasses.dataclass(frozen=True)
class Row:
    """A model in the words of Keras and of torch, and its input."""

    input_shape: tuple[int, ...]
    layers: Callable[[Any], list[Any]]  # of a Keras' `layers`
    modules: Callable[[Any], Any]  # of `torch.nn`
    num_classes: int = 10


def _mlp(width: int, num_inputs: int) -> Row:
    return Row(
        (num_inputs,),
        lambda layers: [layers.Dense(width, activation="relu"), layers.Dense(width, activation="relu")],
        lambda nn: nn.Sequential(nn.Linear(num_inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
    )


def _cnn_modules(nn: Any) -> Any:
    convolutions = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.LazyLinear(430), nn.ReLU())


def _lstm_modules(nn: Any) -> Any:
    class Last(nn.Module):  # type: ignore[misc]  # a base class of any type
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(32, 128, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.lstm(x)[0][:, -1]

    return Last()


ROWS = {
    "tiny": Row(
        (8,),
        lambda layers: [layers.Dense(16, activation="relu")],
        lambda nn: nn.Sequential(nn.Linear(8, 16), nn.ReLU()),
    ),
    "mlp1m": _mlp(680, 784),
    "mlp20m": _mlp(4000, 784),
    "cnn1m": Row(
        (32, 32, 3),
        lambda layers: [
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(430, activation="relu"),
        ],
        _cnn_modules,
    ),
    "lstm": Row((24, 32), lambda layers: [layers.LSTM(128)], _lstm_modules),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if a contestant failed, else 0, whether or not the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}, with commas between")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="with commas between")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each contestant")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one sample")
    parser.add_argument("--json", type=pathlib.Path, help="a file for all samples")
    parser.add_argument("--worker", nargs=3, metavar=("CONTESTANT", "ROW", "INDEX"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        contestant, row, index = options.worker
        serve(contestant, row, int(index))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(str(describe_machine(("tensorflow", "keras", "tf_keras", "torch"))), highlight=False)
    found, num_failed = {}, 0
    for row in options.rows.split(","):
        with contextlib.ExitStack() as stack:
            teams = {}
            for contestant in options.contestants.split(","):
                try:
                    teams[contestant] = stack.enter_context(started(contestant, row))
                    teams[contestant].size(options.seconds)
                except (RuntimeError, OSError) as error:
                    num_failed += 1
                    teams.pop(contestant, None)
                    console.print(f"{row}, {contestant}: {error}", style="red", markup=False, highlight=False)
            if teams:
                found[row] = take_turns({name: team.sample for name, team in teams.items()}, options.rounds)
                print_table(console, *table({row: found[row]}))
        if options.json:
            options.json.write_text(json.dumps({name: dataclasses.asdict(timings) for name, timings in found.items()}))
    return int(num_failed > 0)


def table(found: dict[str, Timings]) -> tuple[str, list[str], list[list[str]]]:
    """Milliseconds a step, and the ratios that have a goal."""
    lines = []
    for row, timings in found.items():
        steps = "\n".join(f"{name} {timings.spread(name).show(2, 1e3)}" for name in timings.samples)
        ratios = []
        for pair, goals in GOALS.items():
            ours, other = pair.split(" / ")
            if ours in timings.samples and other in timings.samples:
                ratio, goal = timings.ratio(ours, other), goals.get(row, goals[""])
                ratios.append(f"{pair} {ratio.show(2)}; goal {goal}{'' if ratio.median <= goal else ', missed'}")
        lines.append([row, steps, "\n".join(ratios), f"{timings.others_cores:.1f}"])
    return "", ["model", "ms a step, median (quartiles)", "ratio, median (quartiles)", "cores of others"], lines


class Team:
    """The processes of a contestant, which wait until they are told how many steps to train."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self._num_steps = 0

    def size(self, seconds: float) -> None:
        """Compile, and let a sample be as many steps as take so long."""
        self._train(5)
        num_steps, took = 10, self._train(10)
        while num_steps * took < seconds / 4:
            num_steps *= 4
            took = self._train(num_steps)
        self._num_steps = max(5, round(seconds / took))

    def sample(self) -> float:
        """Train, and return seconds a step, of the slower worker."""
        return self._train(self._num_steps)

    def _train(self, num_steps: int) -> float:
        for process in self._processes:
            assert process.stdin
            process.stdin.write(f"{num_steps}\n")
            process.stdin.flush()
        return max(self._answer(process) for process in self._processes)

    def _answer(self, process: subprocess.Popen[str]) -> float:
        assert process.stdout
        last = ""
        for line in process.stdout:
            if line.startswith("RESULT "):
                return float(line.split()[1])
            last = line.strip() or last
        raise RuntimeError(f"a worker ended: {last}")


@contextlib.contextmanager
def started(contestant: str, row: str) -> Iterator[Team]:
    """Start a contestant's workers, a core each; end them afterwards, and where they take too long."""
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(NUM_WORKERS)]
    cores = sorted(os.sched_getaffinity(0))
    processes = []
    for index in range(NUM_WORKERS):
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "2",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "KERAS_BACKEND": "tensorflow",
            "BENCH_ADDRESS": addresses[0],
        }
        if contestant != "torch":
            environ["TF_CONFIG"] = json.dumps(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            )
        command = [sys.executable, __file__, "--worker", contestant, row, str(index)]
        processes.append(
            subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=functools.partial(os.sched_setaffinity, 0, {cores[index % len(cores)]}),
                start_new_session=True,
            )
        )
    try:
        yield Team(processes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(taken.getsockname()[1]) for taken in sockets]


def serve(contestant: str, row: str, index: int) -> None:
    """Train as many steps as a line of the standard input says, say how long a step took, and so on."""
    prepare = {"tf_keras": by_tf_keras, "loop": by_hand, "torch": by_torch}.get(contestant)
    signal.alarm(START_SECONDS)
    train = prepare(ROWS[row], index) if prepare else by_fit(ROWS[row], contestant)
    for line in sys.stdin:
        signal.alarm(START_SECONDS + SAMPLE_SECONDS)
        print(f"RESULT {train(int(line))}", flush=True)
        signal.alarm(0)
    os._exit(0)


def case_of(row: Row) -> Case:
    """A row as the other benchmarks have it."""
    return Case(
        lambda classes: classes.sequential(_keras_layers(row, __import__("keras").layers)),
        row.input_shape,
        row.num_classes,
        ROWS_OF_WORKER * NUM_WORKERS,
        memory_steps=0,
    )


def _keras_layers(row: Row, layers: Any) -> list[Any]:
    outputs = layers.Dense(row.num_classes, activation="softmax")
    return [layers.Input(row.input_shape), *row.layers(layers), outputs]


def _timed_fit(model: Any, data: Any, times: Any, *callbacks: Any) -> Train:
    def train(num_steps: int) -> float:
        model.fit(data, epochs=2, steps_per_epoch=num_steps, verbose=0, callbacks=[times, *callbacks])
        return float(times.ends[-1] - times.begins[1]) / num_steps

    return train


def by_fit(row: Row, contestant: str) -> Train:
    """`kde.Model.fit`, as it comes, watched, seeded, with gradients in 16 bits, or summed in buckets."""
    import keras

    import keras_dist_ext as kde

    bytes_per_pack = 2**20 if contestant == "buckets" else 0
    strategy = kde.pick_strategy("multi_worker", bytes_per_pack=bytes_per_pack).strategy
    case = case_of(row)
    with strategy.scope():
        model = case.build(Classes(kde.Model, kde.Sequential))
        given = {"gradient_compression": "bfloat16"} if contestant == "ours16" else {}
        model.compile(keras.optimizers.Adam(), case.loss, **given)
    more = {"watched": [kde.ReplicaMonitor(writers=[kde.MemoryWriter()])], "seeded": [kde.ReplicaSeeds(1)]}
    return _timed_fit(model, batches_of(case), epoch_times(), *more.get(contestant, []))


def by_tf_keras(row: Row, index: int) -> Train:
    """`fit` of Keras 2, as it comes."""
    import tensorflow as tf
    import tf_keras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    case = case_of(row)
    with strategy.scope():
        model = tf_keras.Sequential(_keras_layers(row, tf_keras.layers))
        model.compile(tf_keras.optimizers.Adam(), case.loss)

    class EpochTimes(tf_keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        begins: list[float]
        ends: list[float]

        def on_train_begin(self, logs: Any = None) -> None:
            self.begins, self.ends = [], []

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.begins.append(time.perf_counter())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.ends.append(time.perf_counter())

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = batches_of(case).with_options(options)  # of the global batch, of which TensorFlow gives each worker its rows
    return _timed_fit(model, strategy.experimental_distribute_dataset(data), EpochTimes())


def by_hand(row: Row, index: int) -> Train:
    """A loop as someone writes it who knows tf.distribute."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    case = case_of(row)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = batches_of(case).with_options(options)  # of the global batch, of which TensorFlow gives each worker its rows
    return prepare_floor(Classes(keras.Model, keras.Sequential), case, strategy, data)


def by_torch(row: Row, index: int) -> Train:
    """A loop over torch's DistributedDataParallel."""
    import numpy as np
    import torch
    from torch import distributed, nn

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{os.environ['BENCH_ADDRESS']}", rank=index, world_size=NUM_WORKERS
    )
    random = np.random.default_rng(index)
    shape = row.input_shape if len(row.input_shape) < 3 else (row.input_shape[-1], *row.input_shape[:-1])
    x = torch.tensor(random.normal(size=(ROWS_OF_WORKER, *shape)).astype("float32"))
    y = torch.tensor(random.integers(row.num_classes, size=ROWS_OF_WORKER))
    model = nn.Sequential(row.modules(nn), nn.LazyLinear(row.num_classes))
    model(x)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer, loss_of = torch.optim.Adam(parallel.parameters()), nn.CrossEntropyLoss()

    def train(num_steps: int) -> float:
        began = time.perf_counter()
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss_of(parallel(x), y).backward()
            optimizer.step()
        return (time.perf_counter() - began) / num_steps

    return train


if __name__ == "__main__":
    sys.exit(main())
