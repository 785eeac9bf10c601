"""Predict a few rows both on one device and on replicas, and measure what differs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras import keras, tree
from keras_dist_ext._keras.variables import components
from keras_dist_ext.aliases import Array, StepData, TensorNest
from keras_dist_ext.step.graphs import in_graph
from keras_dist_ext.training.comparable_steps import comparable, refuse_python, unoptimized
from keras_dist_ext.training.deviations import Deviation, Part, measure, moved_by_rounding, rounding_of
from keras_dist_ext.training.prediction import PredictProgram
from keras_dist_ext.training.snapshot import kept_numbers, kept_state

__all__ = ["compare_predictions"]


def compare_predictions(program: PredictProgram, rows: StepData) -> list[Deviation]:
    """Predict both ways, from the same state, and return what differs beyond rounding.

    Raises:
        CannotCompare: the step cannot be made on so few rows, calls Python when it runs, or draws random numbers that
            cannot be made alike for all rows.
    """
    model = program.model
    with comparable(model, rows):
        copy = program.untraced_copy(rows)
        one, many = (_runner(model, run, rows) for run in (copy.run_on_first_replica, copy.run_on_replicas))
        expected, found = _outputs(model, one), _outputs(model, many)
        if all(np.array_equal(value[0], found[part][0]) for part, value in expected.items() if part in found):
            return []
        moved = _outputs(model, one, by_rounding=True)
    stable = {
        part: value
        for part, value in expected.items()
        if not _flips(value[0], moved[part][0]) and not (part in found and _has_other_rows(value[0], found[part][0]))
    }
    deviations = measure(stable, found, moved, {}, 1, rounding_of(model), {})
    return [deviation for deviation in deviations if deviation.is_beyond]


def _runner(model: keras.Model, run: Callable[[StepData], TensorNest], rows: StepData) -> Callable[[], TensorNest]:
    if model.run_eagerly:
        return functools.partial(run, rows)
    spec = tree.map_structure(lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), rows)
    traced = in_graph(run).get_concrete_function(spec)
    refuse_python(traced.graph)
    return functools.partial(traced, rows)


def _outputs(
    model: keras.Model, run: Callable[[], TensorNest], *, by_rounding: bool = False
) -> dict[Part, tuple[Array, ...]]:
    """Return what is predicted, of numbers; from weights that are moved by rounding, if so told."""
    with kept_state(model), kept_numbers(model), unoptimized():
        if by_rounding:
            random = np.random.default_rng(0)
            for variable in model.weights:
                components(variable)[0].assign(moved_by_rounding(components(variable)[0].numpy(), random))
        outputs = run()
    found: dict[Part, tuple[Array, ...]] = {}
    for path, output in tree.flatten_with_path(outputs):
        for leaf in tf.nest.flatten(output, expand_composites=True):
            if tf.is_tensor(leaf) and (leaf.dtype.is_floating or leaf.dtype.is_integer or leaf.dtype.is_bool):
                name = "/".join(map(str, path)) or "of predict_step"
                found["output", name if ("output", name) not in found else f"{name} ({len(found) + 1})"] = (
                    np.asarray(leaf),
                )
    return found


def _has_other_rows(value: Array, found: Array) -> bool:
    """Whether there are more or fewer rows, which predicting refuses by itself."""
    return value.ndim == found.ndim > 0 and value.shape[1:] == found.shape[1:] and len(value) != len(found)


def _flips(value: Array, moved: Array) -> bool:
    """Whether rounding decides what a number is that is not rounded itself: the larger of two equal ones."""
    return value.dtype.kind in "iub" and not np.array_equal(value, moved)
