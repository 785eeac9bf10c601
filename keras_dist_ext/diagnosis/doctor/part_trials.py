"""Measure what single parts of a step take: some steps with each and without, after which all is put back."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.loops import counted_turns
from keras_dist_ext._keras.tracing import scratch_graph
from keras_dist_ext._keras.user_code import is_users, runs_user_code
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.diagnosis.doctor.interventions import Conditions
from keras_dist_ext.diagnosis.doctor.layout_speed import measure_layout
from keras_dist_ext.diagnosis.doctor.map_loops import MAP_LOOP, measure_turn
from keras_dist_ext.diagnosis.doctor.parts import Looped, Metered, OneHot, Parts, RecurrentDropout, Summaries
from keras_dist_ext.diagnosis.doctor.trials import Trials
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.snapshot import kept_state

__all__ = ["measure_parts"]

_MUCH_STATE = 10_000  # numbers, which each step reads and writes: less is nothing to be seen
_MOST = 3  # that are timed
_SECONDS = 0.5  # of rounds
_ROUNDS = (7, 11)
_THRESHOLDS = 200  # of Keras' metrics, if nothing else is asked for
_LONG_ONE_HOT = 1000
_WRITES = re.compile(r"Write(Raw\w+|Scalar|Image|Histogram|Audio)?Summary")  # ops/gen_summary_ops.py
_SHAPES = ("Reshape", "Transpose", "Identity", "Cast", "Squeeze", "ExpandDims")  # ops that leave one-hot vectors such

Condition: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
Nodes: TypeAlias = list[Any]  # of a graph's function: tf.compat.v1.NodeDef


def measure_parts(
    model: keras.Model,
    dataset: tf.data.Dataset,
    graphs: Sequence[tf.Graph],
    num_steps: int,
    device: str,
    *,
    computes: bool = True,
) -> Parts:
    """Time steps without single metrics, and without what single layers do, where these may cost much.

    Args:
        model: a built model of ours that trains in this process, and has made a step.
        dataset: what the run reads, to be read once more.
        graphs: of its training function.
        num_steps: of an execution.
        device: of a replica, such as "CPU:0".
        computes: whether steps compute, or update, for a good part of the time; else only summaries are looked at.
    """
    steps = _Steps(model, dataset, num_steps)
    layers = {layer.name: layer for layer in flat_layers(model) if layer is not model}
    nodes = [
        list(nodes)
        for definition in (graph.as_graph_def() for graph in graphs)
        for nodes in (definition.node, *(function.node_def for function in definition.library.function))
    ]
    summaries = _written(nodes, steps)
    if not computes:
        return Parts(summaries=summaries)
    return Parts(
        tuple(_metered(metric, steps) for metric in _costly(model)),
        tuple(_looped(*replaced, steps, device) for replaced in _looping(nodes, layers, model)),
        tuple(_one_hot(layer, steps) for layer in _given_one_hots(nodes, layers)),
        tuple(_dropped(layer, steps) for layer in _with_recurrent_dropout(layers)),
        summaries,
        measure_layout(model, device),
    )


class _Steps:
    """Steps of a model, to be timed as they were and without a part of them, on a cached batch."""

    def __init__(self, model: keras.Model, dataset: tf.data.Dataset, num_steps: int) -> None:
        self.num_replicas = int(model.distribute_strategy.num_replicas_in_sync)
        self._model, self._batch, self._num_steps = model, dataset.take(1).cache(), num_steps

    def timed(self, without: Condition, *, xla: bool = False) -> Trials:
        """Time them in turn: "as it was", "without", and "compiled" if that is asked for and XLA can."""
        model, conditions = self._model, Conditions(self._model, self._num_steps)
        with self._kept():
            conditions.add("as it was", self._batch)
            conditions.add("without", self._batch, condition=without)
            if xla and not model.jit_compile and self.num_replicas == 1:
                conditions.add("compiled", self._batch, step=_WithXla)
            if "without" in conditions.skipped or "as it was" in conditions.skipped:
                conditions.close()
                return Trials(skipped=dict(conditions.skipped))
            return conditions.measure(_SECONDS, rounds=_ROUNDS)

    def run_once(self, changed: Condition, begin: Callable[[], None]) -> bool:
        """Make a step that is changed, after another one that traces it; return whether that was possible."""
        conditions = Conditions(self._model, 1)
        with self._kept(), changed():
            conditions.add("changed", self._batch, num_steps=1)
            begin()
            if not conditions.skipped:
                conditions.run("changed")
            conditions.close()
        return not conditions.skipped

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        with kept_state(self._model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of gradients that are not there, and of what XLA cannot compile
            self._model.replica_runtime.recorders = ()
            yield


class _WithXla(DistributedStep):
    """A step that XLA compiles."""

    def __init__(self, model: keras.Model, kind: Kind) -> None:
        super().__init__(model, kind)
        self.with_xla()


# Metrics


def _costly(model: keras.Model) -> list[keras.Metric]:
    """Return the metrics that have much state or code of the user's, the one with most state first."""
    given = [inner for metric in model.metrics for inner in getattr(metric, "metrics", [metric])]
    metrics = [metric for metric in given if _size(metric) >= _MUCH_STATE or runs_user_code(metric)]
    return sorted(metrics, key=_size, reverse=True)[:_MOST]


def _metered(metric: keras.Metric, steps: _Steps) -> Metered:
    trials = steps.timed(_replaced(metric, "update_state", lambda *_, **__: None))
    return Metered(metric.name, type(metric).__name__, trials, *_argument(metric))


def _size(metric: keras.Metric) -> int:
    return sum(math.prod(variable.shape) for variable in metric.variables)


def _argument(metric: keras.Metric) -> tuple[str, str]:
    """Return the argument by which a metric of Keras has much state, and a smaller one."""
    given = getattr(metric, "num_thresholds", None)
    if is_users(type(metric)) or not isinstance(given, int) or given <= _THRESHOLDS:
        return "", ""
    return f"num_thresholds={given}", f"num_thresholds={_THRESHOLDS}"


# Loops


def _looping(
    functions: Sequence[Nodes], layers: dict[str, keras.Layer], model: keras.Model
) -> list[tuple[str, object, str, Callable[..., TensorNest]]]:
    """Return what loops in the forward pass, but for Keras' own RNN and `tf.map_fn`: layers, and the loss as "".

    With each come its owner and method, and another one that does nothing.
    """
    found: dict[str, None] = {}
    for node in itertools.chain.from_iterable(functions):
        if node.op not in ("While", "StatelessWhile") or node.name.startswith("gradient"):
            continue
        around = _named(node.name, layers)
        if any(isinstance(layer, keras.layers.RNN) for layer in around) or MAP_LOOP.search(
            node.name.removesuffix("_grad")
        ):
            continue
        found |= {layer.name: None for layer in around if is_users(type(layer).call)}
        if not around and "compile_loss" in node.name.split("/"):  # trainers/compile_utils.py
            found[""] = None
    return [
        (name, layers[name], "call", _without(layers[name])) if name else ("", model, "compute_loss", _no_loss)
        for name in found
    ][:_MOST]


def _named(name: str, layers: dict[str, keras.Layer]) -> list[keras.Layer]:
    """Return the layers that an op's name may tell of: `dense_1` is one of that name, or another call of `dense`."""
    return [
        layer
        for own, layer in layers.items()
        if any(part == own or re.fullmatch(re.escape(own) + r"_\d+", part) for part in name.split("/")[:-1])
    ]


def _looped(
    name: str, owner: object, method: str, without: Callable[..., TensorNest], steps: _Steps, device: str
) -> Looped:
    trials = steps.timed(_replaced(owner, method, without), xla=True)
    return Looped(name, trials, _num_turns(owner, method, steps), measure_turn(device))


def _num_turns(owner: object, method: str, steps: _Steps) -> float:
    """Return how often the loops of a layer go round in a step of a replica; 0 where that cannot be seen."""
    turns: list[None] = []
    original = getattr(owner, method)

    def call(*args: object, **kwargs: object) -> TensorNest:
        with counted_turns(lambda: turns.append(None)):
            return original(*args, **kwargs)

    is_known = steps.run_once(_replaced(owner, method, call), turns.clear)
    return len(turns) / steps.num_replicas if is_known else 0.0


# One-hot vectors, and dropout in recurrences


def _given_one_hots(functions: Sequence[Nodes], layers: dict[str, keras.Layer]) -> list[keras.Layer]:
    """Return the Dense layers that multiply long one-hot vectors in the forward pass."""
    found: dict[str, None] = {}
    for nodes in functions:
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            if not node.op.startswith(("MatMul", "BatchMatMul")) or node.name.startswith("gradient"):
                continue
            source = by_name.get(node.input[0].partition(":")[0])
            while source is not None and source.op in _SHAPES and source.input:
                source = by_name.get(source.input[0].partition(":")[0])
            if source is not None and source.op == "OneHot":
                found |= {layer.name: None for layer in _named(node.name, layers) if _is_long(layer)}
    return [layers[name] for name in found][:_MOST]


def _is_long(layer: keras.Layer) -> bool:
    return isinstance(layer, keras.layers.Dense) and layer.built and layer.kernel.shape[0] >= _LONG_ONE_HOT


def _one_hot(layer: keras.layers.Dense, steps: _Steps) -> OneHot:
    rows, columns = layer.kernel.shape
    return OneHot(layer.name, rows, columns, steps.timed(_replaced(layer, "call", _without(layer))))


def _with_recurrent_dropout(layers: dict[str, keras.Layer]) -> list[keras.Layer]:
    return [
        layer
        for layer in layers.values()
        if isinstance(layer, keras.layers.LSTM | keras.layers.GRU | keras.layers.SimpleRNN) and layer.recurrent_dropout
    ][:_MOST]


def _dropped(layer: keras.layers.RNN, steps: _Steps) -> RecurrentDropout:
    @contextlib.contextmanager
    def without() -> Iterator[None]:  # by which a cell computes its gates at once (layers/rnn/lstm.py)
        with _replaced(layer.cell, "recurrent_dropout", 0.0)(), _replaced(layer.cell, "implementation", 2)():
            yield

    trials = steps.timed(without)
    return RecurrentDropout(layer.name, type(layer).__name__, layer.recurrent_dropout, trials)


# Summaries


def _written(functions: Sequence[Nodes], steps: _Steps) -> Summaries | None:
    """Time steps that write no summaries; None where they write none."""
    ops: dict[str, str] = {}  # by name, which comes once in each graph of the same step
    for nodes in functions:
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            if _WRITES.fullmatch(node.op):
                given = [by_name.get(name.partition(":")[0]) for name in node.input]
                constants = [
                    tf.make_ndarray(each.attr["value"].tensor) for each in given if each and each.op == "Const"
                ]
                tags = [value.item().decode() for value in constants if value.dtype == object and value.ndim == 0]
                ops[node.name] = tags[0] if tags else node.name
    if not ops:
        return None
    tags = list(dict.fromkeys(ops.values()))
    return Summaries(tuple(tags[:3]), len(ops), steps.timed(_silent))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Have no summaries recorded, whatever the step says of it."""
    with tf.summary.record_if(False), _replaced(tf.summary, "record_if", lambda _: contextlib.nullcontext())():
        yield


# What is left out


def _no_loss(x: object = None, y: object = None, y_pred: TensorNest = None, *_: object, **__: object) -> tf.Tensor:
    """Be a loss of zero, which has gradients of zero."""
    return 0.0 * tf.add_n([tf.cast(tf.reduce_sum(leaf), tf.float32) for leaf in tree.flatten(y_pred)])


def _without(layer: keras.Layer) -> Callable[..., TensorNest]:
    """Return a call that gives zeros of the shapes that the layer gives, and has gradients of zero."""
    original = layer.call

    def call(*args: object, **kwargs: object) -> TensorNest:
        with scratch_graph("aside"):
            specs = [
                tf.TensorSpec(leaf.shape, leaf.dtype) if tf.is_tensor(leaf) else leaf
                for leaf in tree.flatten((args, kwargs))
            ]
            leaves = [tf.compat.v1.placeholder(s.dtype, s.shape) if isinstance(s, tf.TensorSpec) else s for s in specs]
            given_args, given_kwargs = tree.pack_sequence_as((args, kwargs), leaves)
            outputs = tree.map_structure(
                lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), original(*given_args, **given_kwargs)
            )
        tensors = [leaf for leaf in tree.flatten(args) if tf.is_tensor(leaf)]
        rest = tf.zeros([])  # by which what is given, and weights, have gradients
        for tensor in (*tensors, *layer.trainable_variables):
            if tf.as_dtype(tensor.dtype).is_floating and tensor.shape.rank:
                rest += 0.0 * tf.cast(tf.reduce_sum(tf.convert_to_tensor(tensor)[:1]), tf.float32)
        rows = tf.shape(tensors[0])[0]

        def zeros(spec: tf.TensorSpec) -> tf.Tensor:
            first, *others = spec.shape.as_list()
            if None in others:
                raise ValueError(f"{layer.name} gives {spec}, of no known shape")
            return tf.zeros([rows if first is None else first, *others], spec.dtype) + tf.cast(rest, spec.dtype)

        return tree.map_structure(zeros, outputs)

    return call


def _replaced(owner: object, name: str, value: object) -> Condition:
    """Return what gives an object another attribute, or method, for some time."""

    @contextlib.contextmanager
    def replaced() -> Iterator[None]:
        before = vars(owner).get(name)
        object.__setattr__(owner, name, value)
        try:
            yield
        finally:
            if before is None:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, before)

    return replaced
