"""Measure what the shapes of batches cost: some steps on batches that are read again, after which all is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras
from keras_dist_ext.data.padding import SequenceBatches, read_sequences, shapes_of
from keras_dist_ext.diagnosis.doctor.interventions import Conditions
from keras_dist_ext.diagnosis.doctor.shapes import Padding, Recompilation
from keras_dist_ext.diagnosis.doctor.trials import Trials
from keras_dist_ext.errors import KerasDistError
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.snapshot import kept_state

__all__ = ["measure_padding", "measure_recompilation", "read_padding"]

_MOST_BATCHES, _MOST_SHAPES = 32, 200  # that are read again
_SECONDS = 1.0  # of reading, and of rounds
_PASS_SECONDS = 0.4  # of a condition in a round: fewer batches where steps are long
_LEAST_BATCHES = 4
_ROUNDS = (3, 9)
_PADDING, _SPARED = 0.3, 0.2  # shares: less padding, or little that could be spared, is worth no experiment
_MOST = 0.5  # share: less is nothing that can be told from the share alone
_MANY_SHAPES = 5


class _WithoutXla(DistributedStep):
    """A step that XLA does not compile."""

    def __init__(self, model: keras.Model, kind: Kind) -> None:
        super().__init__(model, kind)
        self.without_xla()


def measure_padding(model: keras.Model, dataset: tf.data.Dataset, step_seconds: float) -> Padding | None:
    """Time steps on batches as they come, and on batches of the same rows by length; None where little is padding.

    Args:
        model: a built model of ours that trains in this process, and has made a step.
        dataset: what the run reads, to be read once more.
        step_seconds: of the run's.
    """
    found = _sequences(dataset)
    if found is None:
        return None
    share, by_length = found.padding
    if share < _PADDING or share - by_length < _SPARED:
        return None
    most = max(_LEAST_BATCHES, int(_PASS_SECONDS / max(1e-5, step_seconds)))
    come, by = found.as_they_come[:most], found.by_length
    if model.jit_compile:  # XLA compiles for each
        come, by = come[:_LEAST_BATCHES], by[len(by) // (2 * _LEAST_BATCHES) :: max(1, len(by) // _LEAST_BATCHES)]
    given = {
        "as they come": (found.dataset(come), DistributedStep, len(come)),
        "by length": (found.dataset(by), DistributedStep, len(by)),
    }
    trials = _timed(model, given)
    if not trials.has(*given):
        return None  # the model takes but one length
    return _padding(found, trials)


def read_padding(dataset: tf.data.Dataset) -> Padding | None:
    """Return how much of batches of open length is padding, where nothing can be timed; None where that is little."""
    lengths = [
        leaf.shape[1] for leaf in keras.tree.flatten(dataset.element_spec) if leaf.shape.rank not in (0, 1, None)
    ]
    found = _sequences(dataset) if None in lengths else None
    if found is None or found.padding[0] < _MOST or found.padding[0] - found.padding[1] < _SPARED:
        return None
    return _padding(found, Trials())


def _padding(found: SequenceBatches, trials: Trials) -> Padding:
    return Padding(
        *found.padding,
        sum(len(keras.tree.flatten(batch)[0]) for batch in found.as_they_come),
        found.batch_size,
        found.longest,
        found.mean,
        found.is_padded_by,
        found.boundaries,
        trials,
    )


def measure_recompilation(model: keras.Model, dataset: tf.data.Dataset, steps: Sequence[float]) -> Recompilation | None:
    """Count shapes of batches, and time steps with XLA and without; None where it compiles nothing, or few shapes.

    Args:
        model: a built model of ours that trains in this process, and has made a step.
        dataset: what the run reads, to be read once more.
        steps: what each step took in computing.
    """
    if not model.jit_compile or len(steps) < _MANY_SHAPES:
        return None
    try:
        shapes = shapes_of(dataset, most_batches=min(len(steps), _MOST_SHAPES), seconds=_SECONDS)
    except tf.errors.OpError:
        return None
    distinct = list(dict.fromkeys(shapes))
    if len(distinct) < _MANY_SHAPES:
        return None
    found = _sequences(dataset)
    batches, num_batches = dataset.take(_LEAST_BATCHES).cache(), min(_LEAST_BATCHES, len(shapes))
    given = {"compiled": (batches, DistributedStep, num_batches), "plain": (batches, _WithoutXla, num_batches)}
    trials = _timed(model, given)
    if not trials.has("compiled"):
        return None
    return Recompilation(
        num_shapes=len(distinct),
        num_batches=len(shapes),
        examples=tuple(" and ".join(map(str, shape)) for shape in distinct[:3]),
        only_rows=len({tuple(leaf[1:] for leaf in shape) for shape in distinct}) == 1,
        longest=0 if found is None else found.longest,
        boundaries=() if found is None else found.boundaries,
        batch_size=round(float(np.median([shape[0][0] for shape in shapes]))),
        stage="" if found is None else found.is_padded_by,
        step_seconds=tuple(steps),
        compiled_seconds=float(np.median(trials.seconds["compiled"])),
        plain_seconds=float(np.median(trials.seconds["plain"])) if trials.has("plain") else 0.0,
    )


def _sequences(dataset: tf.data.Dataset) -> SequenceBatches | None:
    with contextlib.suppress(KerasDistError, tf.errors.OpError, ValueError):
        return read_sequences(dataset, most_batches=_MOST_BATCHES, seconds=_SECONDS)
    return None


def _timed(model: keras.Model, given: dict[str, tuple[tf.data.Dataset, type[DistributedStep], int]]) -> Trials:
    """Time conditions, each with its data, its step and how many batches are one round."""
    conditions = Conditions(model, 1)
    with kept_state(model):
        model.replica_runtime.recorders = ()
        for name, (dataset, step, num_batches) in given.items():
            conditions.add(name, dataset, step=step, num_steps=num_batches)
        if conditions.skipped:
            conditions.close()
            return Trials(skipped=dict(conditions.skipped))
        return conditions.measure(_SECONDS, rounds=_ROUNDS)
