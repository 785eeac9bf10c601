"""Compare how soon the first step is over: a first `fit` of one step, ours against stock Keras.

    python benchmarks/bench_start.py                              # about 25 minutes
    python benchmarks/bench_start.py --models tiny,cnn --rounds 2

Each sample is a process of its own, in which TensorFlow and Keras are loaded and the model is built and compiled before
the clock starts; contestants run in turn, and ratios are taken round by round. `own` rows train by a `train_step` as
Keras' guide writes it: on several replicas ours follows it while it is traced to train, and since it only hands on what
Keras computes, neither traces it aside nor checks it. A step that computes something itself, which is traced in a
scratch graph and checked first, has no row here. Then the same model is fitted again, on data of the same shapes:
"traced again" says how often its Python code ran there. Memory is the peak of the process after four steps.

Replicas are logical CPU devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from cases import MODELS, Case, Classes, batches_of, start
from harness import Goal, Timings, describe_machine, print_goals, print_table, run_apart
from rich.console import Console

__all__ = ["main", "measure"]

CONTESTANTS = ("stock", "ours")
NUM_STEPS = 4  # of the second `fit`


def _application(name: str) -> Callable[[Classes], Any]:
    def build(classes: Classes) -> Any:
        import keras

        return getattr(keras.applications, name)(weights=None, input_shape=(64, 64, 3), classes=10)

    return build


def _transformer(classes: Classes) -> Any:
    """Two blocks as in Keras' example of text classification, of 32 tokens."""
    from keras import layers

    tokens = layers.Input((32,), dtype="int32")
    hidden = layers.Embedding(1000, 64)(tokens)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, 16)(hidden, hidden)
        hidden = layers.LayerNormalization()(layers.Add()([hidden, layers.Dropout(0.1)(attended)]))
        forward = layers.Dense(64)(layers.Dense(128, activation="relu")(hidden))
        hidden = layers.LayerNormalization()(layers.Add()([hidden, layers.Dropout(0.1)(forward)]))
    return classes.model(tokens, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling1D()(hidden)))


STARTED = {
    **{name: MODELS[name] for name in ("tiny", "mlp512", "cnn", "lstm")},
    "mobilenet": Case(_application("MobileNetV3Small"), (64, 64, 3), num_classes=10, batch_size=16, memory_steps=0),
    "resnet50": Case(_application("ResNet50"), (64, 64, 3), num_classes=10, batch_size=16, memory_steps=0),
    "transformer": Case(_transformer, (32,), num_classes=10, batch_size=32, memory_steps=0),
}
TAKEN_OVER = ("mobilenet", "resnet50")  # stock models, which ours adopts


@dataclasses.dataclass(frozen=True)
class Start:
    """What one process measures; travels as JSON on its command line."""

    model: str
    num_replicas: int  # 1 = no strategy
    contestant: str
    has_own_step: bool

    @property
    def row(self) -> str:
        """The name of the row in tables and goals."""
        return f"{self.model}{' own' if self.has_own_step else ''} x{self.num_replicas}"


def measure(job: Start) -> dict[str, float]:
    """Fit a model for one step and for some more, in this process.

    Returns:
        "first" and "second", seconds of `fit`; "traced_again", how often a layer was called in the second one, if it
        can be counted; "peak", MiB.
    """
    case = STARTED[job.model]
    strategy = start(job.num_replicas)
    import keras

    base, sequential = keras.Model, keras.Sequential
    if job.contestant == "ours":
        import keras_dist_ext as kde

        base, sequential = kde.Model, kde.Sequential
    if job.has_own_step:
        base, sequential = _with_own_step(base), _with_own_step(sequential)
    dataset = batches_of(case)
    if job.model == "transformer":
        dataset = dataset.map(_tokens_of)
    with strategy.scope():
        model = case.build(Classes(base, sequential))
        if job.model in TAKEN_OVER and (job.contestant == "ours" or job.has_own_step):
            model = base(model.inputs, model.outputs)
        model.compile("adam", case.loss)
    calls = _count_calls(keras)
    seconds = {}
    for name, num_steps in (("first", 1), ("second", NUM_STEPS)):
        before, began = sum(calls), time.perf_counter()
        model.fit(dataset, steps_per_epoch=num_steps, verbose=0, shuffle=False)
        seconds[name] = time.perf_counter() - began
        called = sum(calls) - before
    unit = 2**20 if sys.platform == "darwin" else 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return {**seconds, "traced_again": called, "peak": peak}


def _tokens_of(x: Any, y: Any) -> tuple[Any, Any]:
    import tensorflow as tf

    return tf.cast(100 * tf.abs(x), tf.int32), y


def _count_calls(keras: Any) -> list[int]:
    """Return a list to which each call of a layer's Python code from now on adds an entry."""
    calls: list[int] = []
    call = keras.layers.Layer.__call__

    def counted(layer: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return call(layer, *args, **kwargs)

    keras.layers.Layer.__call__ = counted
    return calls


def _with_own_step(base: Any) -> Any:
    import tensorflow as tf

    class OwnStep(base):  # type: ignore[misc]  # a base class of any type
        """The training step of Keras' guide "Customizing what happens in fit() with TensorFlow"."""

        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {metric.name: metric.result() for metric in self.metrics}

    return OwnStep


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, whether or not the goals are met.

    Raises:
        RuntimeError: A process failed or took too long.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(STARTED), help="with commas between")
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--rounds", type=int, default=3, help="samples of each contestant")
    parser.add_argument("--json", type=pathlib.Path, help="write all samples to this file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        options.result.write_text(json.dumps(measure(Start(**json.loads(options.job)))))
        os._exit(0)
    console = Console(width=None if sys.stdout.isatty() else 160)
    machine = describe_machine()
    console.print(str(machine), highlight=False)
    measured: dict[str, dict[str, list[dict[str, float]]]] = {}
    for model in options.models.split(","):
        for num_replicas in map(int, options.replicas.split(",")):
            for has_own_step in (False, True):
                starts = [Start(model, num_replicas, name, has_own_step) for name in CONTESTANTS]
                samples = _in_turn(starts, options.rounds)
                measured[starts[0].row] = samples
                console.print(f"[dim]{starts[0].row}: {_ratio(samples, 'first').median:.2f}[/]", highlight=False)
    print_table(console, *_table(measured))
    print_goals(console, _goals(measured))
    if options.json:
        options.json.write_text(json.dumps({"machine": dataclasses.asdict(machine), "rows": measured}, indent=1) + "\n")
    return 0


def _in_turn(starts: Sequence[Start], num_rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return each contestant's samples, one a round, another contestant first each round."""
    samples: dict[str, list[dict[str, float]]] = {job.contestant: [] for job in starts}
    for number in range(num_rounds):
        for job in starts[:: -1 if number % 2 else 1]:
            command = [sys.executable, __file__, "--job", json.dumps(dataclasses.asdict(job))]
            samples[job.contestant].append(run_apart(command, 300))
    return samples


def _ratio(samples: dict[str, list[dict[str, float]]], what: str) -> Any:
    values = {name: [sample[what] for sample in of_one] for name, of_one in samples.items()}
    return Timings(values, None).ratio("ours", "stock")


def _table(measured: dict[str, dict[str, list[dict[str, float]]]]) -> tuple[str, list[str], list[list[str]]]:
    columns = ["model", *(f"{name} (s)" for name in CONTESTANTS), "ours / stock", "second fit", "traced again", "peak"]
    rows = []
    for row, samples in measured.items():
        firsts = Timings({name: [sample["first"] for sample in of_one] for name, of_one in samples.items()}, None)
        again = max(sample["traced_again"] for sample in samples["ours"])
        ratios = (_ratio(samples, what).show() for what in ("first", "second"))
        cells = [*(firsts.spread(name).show() for name in CONTESTANTS), *ratios, f"{again:.0f}"]
        rows.append([row, *cells, _ratio(samples, "peak").show(3)])
    return (
        "first fit, of one step: median (quartiles); the last columns: ours / stock, and calls of layers",
        columns,
        rows,
    )


def _goals(measured: dict[str, dict[str, list[dict[str, float]]]]) -> list[Goal]:
    firsts = {row: _ratio(samples, "first").median for row, samples in measured.items()}
    return [
        Goal("first fit <= 1.0 of stock", 1.0, {row: value for row, value in firsts.items() if " own " not in row}),
        Goal("with a step of one's own <= 1.25", 1.25, {row: value for row, value in firsts.items() if " own " in row}),
        Goal(
            "a second fit traces nothing",
            0.0,
            {row: max(sample["traced_again"] for sample in samples["ours"]) for row, samples in measured.items()},
        ),
        Goal("peak memory <= 1.05 of stock", 1.05, {row: _ratio(s, "peak").median for row, s in measured.items()}),
    ]


if __name__ == "__main__":
    sys.exit(main())
