"""What the steps of a loop return, as it was declared: which metrics add it up, and what is kept for all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.strategies import spec_of_replica
from keras_dist_ext.aliases import Array, SpecNest, StepData, TensorNest, UserFunction
from keras_dist_ext.errors import LoopError
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.training.loop.examined_step import Output, examine
from keras_dist_ext.training.loop.replica import Replica
from keras_dist_ext.training.loop.step_metrics import Reduction, StepMetric, metric_of

__all__ = ["DeclaredValues", "spec_of_arrays", "spec_of_rows"]


class DeclaredValues:
    """What steps return, by their kind.

    Args:
        reduce: the declared reductions, by the names of values.
        own_metrics: the metrics among the loop's parts.
    """

    def __init__(self, reduce: Mapping[str, Reduction], own_metrics: Sequence[keras.Metric]) -> None:
        self._reduce = reduce
        self._own_metrics = own_metrics
        self._step_metrics: dict[Kind, dict[str, StepMetric]] = {"train": {}, "test": {}}
        self._outputs: dict[Kind, dict[str, Output]] = {}
        self._updated: dict[Kind, list[keras.Metric]] = {}
        self._signatures: dict[Kind, list[int | None]] = {}  # ranks of the data that the step was examined with
        self._collected: dict[Kind, dict[str, list[Array]]] = {}

    def examine(self, loop: DistributedModel, kind: Kind, function: UserFunction, spec: SpecNest) -> bool:
        """See what a step returns, unless it was examined with such data; return whether others may be traced of it.

        Args:
            loop: the ``TrainLoop``.
            kind: of the step.
            function: the step.
            spec: of one replica's rows, however many there are.

        Raises:
            LoopError: the step would not do what it seems to.
            ScopeError: it uses variables that were not made under the loop's strategy.
        """
        signature = [leaf.shape.rank for leaf in tree.flatten(spec) if leaf is not None]
        if self._signatures.get(kind) == signature:
            return False
        outputs, updated = examine(loop, self._own_metrics, kind, function, self._reduce, spec)
        with loop.replica_runtime.in_scope():
            self._step_metrics[kind] = {
                name: metric_of(name, self._reduce[name], output.spec, has_rows=output.has_rows)
                for name, output in outputs.items()
                if self._reduce[name] != "concat"
            }
        was_examined = kind in self._signatures
        self._outputs[kind], self._updated[kind], self._signatures[kind] = outputs, updated, signature
        return was_examined

    def metrics(self, kind: Kind) -> list[keras.Metric]:
        """Return what values add up to, and the metrics among the parts."""
        return [*self._step_metrics[kind].values(), *self._own_metrics]

    def update(self, kind: Kind, values: Mapping[str, tf.Tensor], replica: Replica) -> None:
        """Add up what a step of a replica has returned."""
        for name, metric in self._step_metrics[kind].items():
            if name in values:
                metric.update_state(values[name], replica)

    def results(self, kind: Kind) -> dict[str, tf.Tensor]:
        """Return what has been added up."""
        declared = {name: metric.result() for name, metric in self._step_metrics[kind].items()}
        return {**declared, **{metric.name: metric.result() for metric in self._updated[kind]}}

    # What is kept for all rows

    def kept(self, kind: Kind) -> list[str]:
        """Return which values are kept for all rows, as far as it is known."""
        return [name for name in self._outputs.get(kind, {}) if self._reduce[name] == "concat"]

    def begin_to_keep(self, kind: Kind) -> None:
        """Forget what was kept."""
        self._collected[kind] = {}

    def keep(self, kind: Kind, name: str, value: TensorNest) -> None:
        """Keep the rows of a batch."""
        self._collected[kind].setdefault(name, []).append(np.asarray(value))

    def rows(self, kind: Kind) -> dict[str, Array]:
        """Return what was kept, by name.

        Raises:
            LoopError: rows of different batches have different shapes.
        """
        return {name: _joined(name, parts) for name, parts in self._collected.get(kind, {}).items()}


def _joined(name: str, parts: Sequence[Array]) -> Array:
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise LoopError(
            f"{name!r} is kept for all rows, and rows of different batches have the shapes "
            f"{', '.join(map(str, sorted(shapes)))}, so they cannot be one array. Pad them to one shape in the step, "
            "as tf.pad does."
        )
    return np.concatenate(parts)


def spec_of_arrays(batch: StepData) -> SpecNest:
    """Return the spec of a batch of arrays."""
    return tree.map_structure(_spec_of, batch)


def _spec_of(leaf: TensorNest) -> tf.TypeSpec | None:
    return None if leaf is None else tf.type_spec_from_value(tf.convert_to_tensor(leaf))


def spec_of_rows(spec: SpecNest) -> SpecNest:
    """Return the spec of one replica's rows of a batch, however many there are."""
    return tree.map_structure(_any_rows, spec)


def _any_rows(spec: tf.TypeSpec) -> tf.TypeSpec | None:
    spec = spec_of_replica(spec)
    if isinstance(spec, tf.OptionalSpec) or not hasattr(spec, "shape"):
        return None
    shape = spec.shape
    if shape.rank:
        shape = tf.TensorShape([None, *shape[1:]])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return (
        tf.SparseTensorSpec(shape, spec.dtype)
        if isinstance(spec, tf.SparseTensorSpec)
        else tf.TensorSpec(shape, spec.dtype)
    )
