"""Find the first variable whose copies on the replicas differ, by a hash that each device computes of its own copies.

Replicas begin with equal weights and apply equal updates, so their copies have the same bits as long as all is well. A
hash is the sum of a variable's bits, taken as integers and multiplied by odd pseudo-random numbers, modulo 2**64: one
element that differs always shows, several together do but for a chance of about 2**-64.

Letters: V = variables; L = replicas of this worker; R = replicas in sync, over all workers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext._keras.layers import flat_layers
from keras_dist_ext._keras.optimizers import accumulated_gradients
from keras_dist_ext._keras.strategies import first_replica
from keras_dist_ext._keras.variables import Variable, components, is_sync_on_read, local_component
from keras_dist_ext.findings import FindingRecord
from keras_dist_ext.step.distributed_model import DistributedModel
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.strategy.scope import optimizers, raw_variables
from keras_dist_ext.strategy.workers import Workers, workers_of

__all__ = ["Divergence"]


class Divergence:
    """Compares the copies of a model's and its optimizer's variables.

    Not compared are metrics, of which each replica has its part, and gradients while they accumulate.

    Args:
        model: of this package.
    """

    def __init__(self, model: DistributedModel) -> None:
        self._model = model
        self._strategy: tf.distribute.Strategy = model.distribute_strategy
        self._workers: Workers | None = workers_of(self._strategy)
        self._hashed: list[tuple[str, Variable]] = []
        self._hash_all: Callable[[], tuple[tf.Tensor, ...]]
        self._equal_at: int | None = None

    def check(self, step: int) -> FindingRecord | None:
        """Compare now; return the finding, or None when all copies are equal. All workers must call it together."""
        if self._strategy.num_replicas_in_sync == 1:
            return None
        variables = _variables(self._model)
        if not variables:
            return None
        if [id(v) for _, v in variables] != [id(v) for _, v in self._hashed]:
            self._hashed = variables
            self._hash_all = in_graph(self._hashes_of_replicas)
        hashes = self._over_workers(np.array([np.asarray(h) for h in self._hash_all()]))
        differs = (hashes != hashes[:1]).any(axis=0)
        if not differs.any():
            self._equal_at = step
            return None
        return self._finding(hashes, differs, step)

    def _hashes_of_replicas(self) -> tuple[tf.Tensor, ...]:
        def hashes() -> tf.Tensor:
            return tf.stack([_hash(local_component(variable)) for _, variable in self._hashed])

        return self._strategy.experimental_local_results(self._strategy.run(hashes))  # type: ignore[no-any-return]

    def _over_workers(self, local: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the hashes of all replicas, [R, V], from those of this worker's, [L, V]."""
        if self._workers is None:
            return local
        folded = local.view(np.uint64)
        folded = (folded ^ (folded >> np.uint64(32))) & np.uint64(2**52 - 1)  # which float64 holds exactly
        first = first_replica(self._strategy)
        everywhere = np.zeros((self._strategy.num_replicas_in_sync, local.shape[1]))
        everywhere[first : first + len(local)] = folded
        summed = self._workers.sum(everywhere.ravel().tolist())
        hashes: npt.NDArray[np.int64] = summed.reshape(everywhere.shape).astype(np.int64)
        return hashes

    def _finding(self, hashes: npt.NDArray[np.int64], differs: npt.NDArray[np.bool_], step: int) -> FindingRecord:
        place = int(differs.argmax())
        name, variable = self._hashed[place]
        replica = int((hashes[:, place] != hashes[0, place]).argmax())
        num_others = int(differs.sum()) - 1
        verb = "does 1 other" if num_others == 1 else f"do {num_others} others"
        others = f" So {verb} of {len(differs)} variables." if num_others else ""
        when = "at the first check" if self._equal_at is None else f"all were equal at step {self._equal_at}"
        return FindingRecord(
            step=step,
            kind="divergence",
            code="replicas-differ",
            what=f"{name} differs between replica 0 and replica {replica} at step {step}.{others}",
            evidence=f"hash {hashes[0, place] & 0xFFFFFFFF:08x} against {hashes[replica, place] & 0xFFFFFFFF:08x}; "
            f"{when}{self._distance(variable, replica)}",
            fix="From here on the replicas train different models. Look for code that assigns this variable from what "
            "one replica sees (its own rows, tf.random, the replica's number), and sum or average it over replicas.",
        )

    def _distance(self, variable: Variable, replica: int) -> str:
        copies = components(variable)
        if self._workers is not None or replica >= len(copies) or not copies[0].dtype.is_floating:
            return ""
        first, other = (np.asarray(tf.cast(copies[i], tf.float64)) for i in (0, replica))
        return f"; up to {np.abs(first - other).max():.3g} apart"


def _variables(model: DistributedModel) -> list[tuple[str, Variable]]:
    """Return the variables whose copies must be equal, with their paths, in the order in which a model computes."""
    skipped = {id(variable) for variable in model.metrics_variables}
    found = [(variable.path, variable) for variable in model.variables]
    for layer in flat_layers(model):  # of numbers that are no floats, replicas may keep some apart: seeds
        own = [(f"{layer.path or layer.name}/{name}", variable) for name, variable in raw_variables(layer)]
        found += [(path, variable) for path, variable in own if variable.dtype.is_floating]
    for attribute, optimizer in optimizers(model):
        skipped |= {id(variable) for variable in accumulated_gradients(optimizer)}
        found += [(f"{attribute}/{variable.path}", variable) for variable in optimizer.variables]
    unique = {id(variable): (path, variable) for path, variable in found if id(variable) not in skipped}
    return [
        (path, variable)
        for path, variable in unique.values()
        if isinstance(variable, keras.Variable | tf.Variable) and not is_sync_on_read(variable)
    ]


def _hash(variable: Variable) -> tf.Tensor:
    """Return the hash of a replica's copy, int64."""
    value = tf.reshape(tf.convert_to_tensor(variable), [-1])
    if value.dtype == tf.bool:
        value = tf.cast(value, tf.uint8)
    return _hash_of_bits(tf.cast(tf.bitcast(value, _INTEGERS[value.dtype.size]), tf.int64))


@tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.int64)])  # type: ignore[untyped-decorator]
def _hash_of_bits(bits: tf.Tensor) -> tf.Tensor:  # traced once, for all variables
    index = tf.range(1, tf.size(bits, out_type=tf.int64) + 1, dtype=tf.int64)
    mixed = index * _ODD[0]
    mixed = tf.bitwise.bitwise_xor(mixed, tf.bitwise.right_shift(mixed, 29)) * _ODD[1]
    return tf.reduce_sum((bits + 1) * tf.bitwise.bitwise_or(mixed, 1))


_INTEGERS = {1: tf.uint8, 2: tf.int16, 4: tf.int32, 8: tf.int64}
_ODD = (-7046029254386353131, -4658895280553007687)  # SplitMix64's, as int64
