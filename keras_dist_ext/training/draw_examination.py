"""Trace a step in scratch graphs of two numbers of rows, to see which draws have a dimension of examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import tensorflow as tf

from keras_dist_ext._keras import tree
from keras_dist_ext._keras.tracing import functions_traced_apart, scratch_graph
from keras_dist_ext.aliases import SpecNest, StepData
from keras_dist_ext.errors import SeedError
from keras_dist_ext.step.added_losses import placeholders
from keras_dist_ext.step.draw_refusals import FIX
from keras_dist_ext.step.drawn_shapes import NUMBERS_OF_ROWS, NotedDraw
from keras_dist_ext.step.observer import StepObserver
from keras_dist_ext.training.batch_spec import any_number_of_rows
from keras_dist_ext.training.distributed_step import DistributedStep
from keras_dist_ext.training.snapshot import kept_random
from keras_dist_ext.training.step_exponents import rows_of_step

__all__ = ["cannot_note", "learn_draws", "note_draws"]

_ANY_SIZE = 16  # of other dimensions, if there is no batch to read them from


class _Noted(StepObserver):
    def __init__(self) -> None:
        self.numbers: list[tuple[str, tf.TensorShape]] = []

    def on_numbers(self, kind: str, shape: tf.TensorShape) -> None:
        """Record what is drawn."""
        self.numbers.append((kind, shape))


def learn_draws(step: DistributedStep) -> None:
    """Trace a step in a scratch graph, to learn which of its random numbers have a dimension of examples."""
    scratch_step = step.untraced_copy()
    scratch_step.without_xla()
    spec = step.model.replica_runtime.batch_spec
    if spec is None:  # a TrainLoop is not built for a batch
        spec = tree.map_structure(lambda leaf: leaf if leaf is None else any_number_of_rows(leaf), rows_of_step(step))
    step.plan.draws = note_draws(scratch_step, spec, lambda: rows_of_step(step))


class _Examined(Protocol):
    observer: StepObserver

    def run_on_first_replica(self, rows: StepData) -> object:
        """Make the step as one device does."""


def note_draws(step: _Examined, spec: SpecNest, first_rows: Callable[[], StepData]) -> list[NotedDraw]:
    """Return what a step draws, without running it.

    Args:
        step: calls its observer with what it does.
        spec: of a batch of any number of rows.
        first_rows: returns rows of the first batch, for sizes that the spec leaves open; None if there are none.

    Raises:
        SeedError: it draws differently on few rows than on many.
        Exception: whatever the step raises.
    """
    batch = first_rows() if _has_unknown_sizes(spec) else None
    few, many = (_numbers(step, spec, batch, rows) for rows in NUMBERS_OF_ROWS)
    if [kind for kind, _ in few] != [kind for kind, _ in many]:
        raise SeedError(
            f'draws="global": a step draws {len(few)} times on {NUMBERS_OF_ROWS[0]} examples and {len(many)} times on '
            f"{NUMBERS_OF_ROWS[1]}, or other kinds of random numbers, so which of them have a dimension of examples is "
            "unknown. " + FIX
        )
    return [NotedDraw(kind, (shape, other)) for (kind, shape), (_, other) in zip(few, many, strict=True)]


def _has_unknown_sizes(spec: SpecNest) -> bool:
    """Whether a spec leaves open more than the number of rows."""
    return any(leaf is not None and not leaf.shape[1:].is_fully_defined() for leaf in tree.flatten(spec))


def cannot_note(name: str, error: Exception) -> SeedError:
    """Return the error for a model whose step cannot be traced so."""
    numbers = " and ".join(map(str, NUMBERS_OF_ROWS))
    return SeedError(
        f"draws=\"global\": which random numbers of a step of '{name}' have a dimension of examples is seen by tracing "
        f"it in a scratch graph on {numbers} examples, and there it fails ({type(error).__name__}: {error}). " + FIX
    )


def _numbers(step: _Examined, spec: SpecNest, batch: StepData, rows: int) -> list[tuple[str, tf.TensorShape]]:
    found = tree.flatten(batch)
    shapes = iter([getattr(leaf, "shape", None) for leaf in found] if len(found) == len(tree.flatten(spec)) else [])
    sized = tree.map_structure(lambda leaf: _of_rows(leaf, rows, next(shapes, None)), spec)
    step.observer = noted = _Noted()
    with scratch_graph("draws_of_a_step"), kept_random(), functions_traced_apart():
        step.run_on_first_replica(placeholders(sized))
    return noted.numbers


def _of_rows(leaf: tf.TypeSpec | None, rows: int, shape: tf.TensorShape | None) -> tf.TypeSpec | None:
    if not isinstance(leaf, tf.TensorSpec) or not leaf.shape.rank:
        return leaf
    others = [None] * leaf.shape.rank if shape is None or shape.rank != leaf.shape.rank else shape
    sizes = [size or other or _ANY_SIZE for size, other in zip(leaf.shape[1:], others[1:], strict=True)]
    return tf.TensorSpec([rows, *sizes], leaf.dtype)
