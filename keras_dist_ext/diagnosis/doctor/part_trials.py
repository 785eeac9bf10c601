"""Measure what single parts of a step take: some steps with each and without, after which all is put back."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.loops import counted_turns
from keras_dist_ext._keras.tracing import scratch_graph
from keras_dist_ext._keras.user_code import is_users
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.diagnosis.doctor.interventions import Conditions
from keras_dist_ext.diagnosis.doctor.map_loops import MAP_LOOP, measure_turn
from keras_dist_ext.diagnosis.doctor.parts import Looped, Metered
from keras_dist_ext.diagnosis.doctor.setting import layers_of
from keras_dist_ext.diagnosis.doctor.trials import Trials
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.snapshot import kept_state

__all__ = ["measure_loops", "measure_metrics"]

_MUCH_STATE = 10_000  # numbers, which each step reads and writes: less is nothing to be seen
_MOST = 3  # that are timed
_SECONDS = 1.0
_ROUNDS = (5, 11)
_THRESHOLDS = 200  # of Keras' metrics, if nothing else is asked for


def measure_metrics(model: keras.Model, dataset: tf.data.Dataset, num_steps: int) -> tuple[Metered, ...]:
    """Time steps without each metric that has much state or code of the user's; the one with most state first.

    Args:
        model: a built model of ours that trains in this process, and has made a step.
        dataset: what the run reads, to be read once more.
        num_steps: of an execution.
    """
    given = [inner for metric in model.metrics for inner in getattr(metric, "metrics", [metric])]
    metrics = [metric for metric in given if _size(metric) >= _MUCH_STATE or _is_own(metric)]
    found = []
    for metric in sorted(metrics, key=_size, reverse=True)[:_MOST]:
        without = _replaced(metric, "update_state", lambda *_, **__: None)
        trials = _timed(model, dataset, num_steps, without)
        argument, better = _argument(metric)
        found.append(Metered(metric.name, type(metric).__name__, trials, argument, better))
    return tuple(found)


def _size(metric: keras.Metric) -> int:
    return sum(math.prod(variable.shape) for variable in metric.variables)


def _is_own(metric: keras.Metric) -> bool:
    return any(map(is_users, (type(metric), getattr(metric, "_fn", None))))


def _argument(metric: keras.Metric) -> tuple[str, str]:
    """Return the argument by which a metric of Keras has much state, and a smaller one."""
    given = getattr(metric, "num_thresholds", None)
    if is_users(type(metric)) or not isinstance(given, int) or given <= _THRESHOLDS:
        return "", ""
    return f"num_thresholds={given}", f"num_thresholds={_THRESHOLDS}"


def measure_loops(
    model: keras.Model, dataset: tf.data.Dataset, graphs: Iterable[tf.Graph], num_steps: int, device: str
) -> tuple[Looped, ...]:
    """Time steps without each layer whose call has a loop that is not of Keras' own RNN, nor of `tf.map_fn`.

    Args:
        model: as above.
        dataset: as above.
        graphs: of training functions.
        num_steps: of an execution.
        device: of a replica, such as "CPU:0".
    """
    layers = {layer.name: layer for layer in flat_layers(model) if layer is not model}
    found = []
    for name in _looping(graphs, layers)[:_MOST]:
        without = _replaced(layers[name], "call", _without(layers[name]))
        trials = _timed(model, dataset, num_steps, without, xla=True)
        found.append(Looped(name, trials, _num_turns(model, dataset, layers[name]), measure_turn(device)))
    return tuple(found)


def _looping(graphs: Iterable[tf.Graph], layers: dict[str, keras.Layer]) -> list[str]:
    """Return the layers that loop in the forward pass of the first replica."""
    found: dict[str, None] = {}
    for graph in graphs:
        definition = graph.as_graph_def()
        for nodes in (definition.node, *(function.node_def for function in definition.library.function)):
            for node in nodes:
                if node.op not in ("While", "StatelessWhile") or node.name.startswith("gradient"):
                    continue
                around = layers_of(node.name, list(layers))
                is_own = any(isinstance(layers[name], keras.layers.RNN) for name in around)
                if around and not is_own and not MAP_LOOP.search(node.name.removesuffix("_grad")):
                    found[around[-1]] = None
    return list(found)


def _num_turns(model: keras.Model, dataset: tf.data.Dataset, layer: keras.Layer) -> float:
    """Return how often the loops of a layer go round in a step of a replica; 0 where that cannot be seen."""
    turns: list[None] = []
    original, conditions = layer.call, Conditions(model, 1)

    def call(*args: object, **kwargs: object) -> TensorNest:
        with counted_turns(lambda: turns.append(None)):
            return original(*args, **kwargs)

    with kept_state(model), warnings.catch_warnings(), _replaced(layer, "call", call)():
        warnings.simplefilter("ignore")
        model.replica_runtime.recorders = ()
        conditions.add("counted", dataset.take(1).cache(), num_steps=1)
        turns.clear()
        if not conditions.skipped:
            conditions.run("counted")
        conditions.close()
    return len(turns) / int(model.distribute_strategy.num_replicas_in_sync)


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
        rest = tf.zeros([])
        for tensor in (*tensors, *layer.trainable_variables):
            if tf.as_dtype(tensor.dtype).is_floating:
                rest += 0.0 * tf.cast(tf.reduce_sum(tf.convert_to_tensor(tensor)), tf.float32)
        rows = tf.shape(tensors[0])[0]

        def zeros(spec: tf.TensorSpec) -> tf.Tensor:
            first, *others = spec.shape.as_list()
            if None in others:
                raise ValueError(f"{layer.name} gives {spec}, of no known shape")
            return tf.zeros([rows if first is None else first, *others], spec.dtype) + tf.cast(rest, spec.dtype)

        return tree.map_structure(zeros, outputs)

    return call


def _replaced(
    owner: object, name: str, function: Callable[..., TensorNest]
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return what has a method replaced for some time."""

    @contextlib.contextmanager
    def replaced() -> Iterator[None]:
        before = vars(owner).get(name)
        object.__setattr__(owner, name, function)
        try:
            yield
        finally:
            if before is None:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, before)

    return replaced


class _WithXla(DistributedStep):
    """A step that XLA compiles."""

    def __init__(self, model: keras.Model, kind: Kind) -> None:
        super().__init__(model, kind)
        self.with_xla()


def _timed(
    model: keras.Model,
    dataset: tf.data.Dataset,
    num_steps: int,
    without: Callable[[], contextlib.AbstractContextManager[None]],
    *,
    xla: bool = False,
) -> Trials:
    """Time steps as they were and without a part, in turn, on a cached batch."""
    conditions = Conditions(model, num_steps)
    batch = dataset.take(1).cache()
    with kept_state(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gradients that are not there, and of what XLA cannot compile
        model.replica_runtime.recorders = ()
        conditions.add("as it was", batch)
        conditions.add("without", batch, condition=without)
        if xla and not model.jit_compile and model.distribute_strategy.num_replicas_in_sync == 1:
            conditions.add("compiled", batch, step=_WithXla)
        if "without" in conditions.skipped or "as it was" in conditions.skipped:
            conditions.close()
            return Trials(skipped=dict(conditions.skipped))
        return conditions.measure(_SECONDS, rounds=_ROUNDS)
