"""Measure how soon `launch` notices that a worker has died or hangs, and how soon all are back in training.

    python benchmarks/recovery.py --rounds 3        # about 4 minutes; `bench_resume.py` ends with it

Two workers train a tiny model, with a save every 20 steps. In each attempt of one launch worker 1 meets an accident;
the times are from there to the moment when the launcher knows, when all processes are gone, and when the first step of
the next attempt is over. Worker 1 raises an exception, is killed, is stopped by SIGSTOP (of which the launcher waits
five seconds for the end), or hangs in a callback, which is known after the time-out; that is taken off.
"""

from __future__ import annotations

import argparse
import io
import itertools
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from harness import Goal, Spread, describe_machine, print_goals, print_table
from rich.console import Console

ACCIDENTS = ("raise", "kill", "stop", "hang")
TIMEOUT_SECONDS = 30.0  # to hang; starting must take less
NUM_STEPS = 60  # of an attempt, before its accident
GOAL_SECONDS = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and the goal; return 1 if it is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="accidents of each kind")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(str(describe_machine()), highlight=False)
    return report(console, options.rounds)


def report(console: Console, num_rounds: int) -> int:
    """Measure and print; return 1 if the goal is missed."""
    samples = measure(num_rounds)
    rows = [[name, *(Spread.of(seconds).show(1) for seconds in zip(*samples[name], strict=True))] for name in ACCIDENTS]
    columns = ["accident of worker 1", "noticed, s", "all ended, s", "back in training, s"]
    print_table(console, "after an accident: median (quartiles)", columns, rows)
    worst = {name: max(ended for _, ended, _ in times) for name, times in samples.items()}
    goal = Goal(f"all have ended {GOAL_SECONDS:.0f} s after one has died or hangs", GOAL_SECONDS, worst)
    print_goals(console, [goal])
    return int(bool(goal.misses))


def measure(num_rounds: int) -> dict[str, list[tuple[float, float, float]]]:
    """Return for each kind of accident when it was noticed, when all had ended, and when training was back.

    Raises:
        RuntimeError: the launch did not come to its end.
    """
    import keras_dist_ext as kde
    from keras_dist_ext.cluster.process_group import ProcessGroup

    clock = _Clock()
    watch = ProcessGroup.watch

    def watched(*arguments: Any) -> Any:
        failure = watch(*arguments)
        clock.note("noticed")
        return failure

    ProcessGroup.watch = watched  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = kde.launch(
                2,
                train,
                args=(folder, num_rounds),
                max_restarts=num_rounds * len(ACCIDENTS),
                timeout=TIMEOUT_SECONDS,
                environ={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
                stream=clock,
            )
    finally:
        ProcessGroup.watch = watch  # type: ignore[method-assign]
    num_accidents = num_rounds * len(ACCIDENTS)
    counts = {what: len(times) for what, times in clock.times.items()}
    if counts != {"accident": num_accidents, "noticed": num_accidents + 1, "ended": num_accidents,
                  "trains": num_accidents + 1}:  # fmt: skip
        raise RuntimeError(f"{result.num_restarts} restarts for {num_accidents} accidents:\n{clock.getvalue()}")
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ACCIDENTS}
    for attempt in range(result.num_restarts):
        name = ACCIDENTS[attempt % len(ACCIDENTS)]
        began = clock.times["accident"][attempt] + (TIMEOUT_SECONDS if name == "hang" else 0.0)
        noticed, ended = clock.times["noticed"][attempt], clock.times["ended"][attempt]
        samples[name].append((noticed - began, ended - began, clock.times["trains"][attempt + 1] - began))
    return samples


class _Clock(io.StringIO):
    """Where the launch shows its output: notes when lines come in that say what has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, list[float]] = {"accident": [], "noticed": [], "ended": [], "trains": []}

    def note(self, what: str) -> None:
        self.times[what].append(time.perf_counter())

    def write(self, text: str) -> int:
        """Take a part of the output."""
        for line in text.splitlines():
            if line == "[worker 0] trains":
                self.note("trains")
            elif line == "[worker 1] accident":
                self.note("accident")
            elif line.startswith("launch: restart "):
                self.note("ended")
        return super().write(text)


def train(folder: str, num_rounds: int) -> None:
    """What each worker does: train until the accident of this attempt, or to the end."""
    import keras
    import numpy as np

    import keras_dist_ext as kde

    choice = kde.pick_strategy("multi_worker")
    worker = choice.strategy.cluster_resolver.task_id
    attempt = int(os.environ["KERAS_DIST_EXT_RESTART"])

    numbers = itertools.count(1)  # of this attempt; what a callback counts, a resumed run takes over

    class Note(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            number = next(numbers)
            if number == 1:
                print("trains", flush=True)
            if worker == 1 and number == NUM_STEPS and attempt < num_rounds * len(ACCIDENTS):
                print("accident", flush=True)
                _have(ACCIDENTS[attempt % len(ACCIDENTS)])

    with choice.strategy.scope():
        model = kde.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(320, 8)).astype("float32")
    resume = kde.Resume(pathlib.Path(folder) / "saves", 20)
    epochs = 3 * (num_rounds * len(ACCIDENTS) + 1)  # of 20 steps
    model.fit(x, x[:, :1], batch_size=16, epochs=epochs, verbose=0, callbacks=[resume, Note()])


def _have(accident: str) -> None:
    if accident == "raise":
        raise ValueError("an accident")
    if accident == "hang":
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL if accident == "kill" else signal.SIGSTOP)


if __name__ == "__main__":
    sys.exit(main())
