"""Say which steps are to be made at once, on which batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol, TypeAlias

from keras_dist_ext import versions
from keras_dist_ext._keras import tree
from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.errors import BackendError
from keras_dist_ext.step.stats import Kind
from keras_dist_ext.training.batch_reader import BatchReader

__all__ = ["Execution", "Program", "PredictFunction", "RunKind", "StepFunction"]

RunKind: TypeAlias = Kind | Literal["predict"]
"""Of a run: what it makes of its data."""


class Program(Protocol):
    """Makes steps of one kind on the batches of a reader."""

    def run(self, reader: BatchReader, num_steps: int) -> tuple[int, TensorNest]:
        """Run up to so many steps; return how many were made, and the logs."""


class Execution:
    """Some steps on the batches of a reader, to be run once; the first has a number, counted from 1 in the run."""

    def __init__(self, reader: BatchReader, num_steps: int, first: int = 1) -> None:
        self.reader = reader
        self.num_steps = num_steps
        self.first = first
        self.num_made = 0
        self.seconds = 0.0
        self._is_taken = False

    def run(self, program: Program) -> TensorNest:
        """Run the steps and return their logs."""
        begin = time.perf_counter()
        self.num_made, logs = program.run(self.reader, self.num_steps)
        for leaf in tree.flatten(logs)[:1]:
            if hasattr(leaf, "numpy"):
                leaf.numpy()  # wait for the device
        self.seconds = time.perf_counter() - begin
        return logs

    def batches(self) -> Iterator[StepData]:
        """Yield the batches one by one."""
        begin = time.perf_counter()
        while self.num_made < self.num_steps and self.reader.has_more:
            self.num_made += 1
            yield self.reader.next_batch()
        self.seconds = time.perf_counter() - begin

    def __iter__(self) -> Iterator[StepData]:
        """Say that it is not for whoever reads it as batches.

        Raises:
            BackendError: always.
        """
        raise BackendError(
            versions.changed(
                "the function that takes the steps of a run is not that of keras_dist_ext. Either make_train_function, "
                "make_test_function or make_predict_function is overridden: override train_step, test_step or "
                "predict_step instead. Or fit, evaluate or predict no longer call it "
                "(keras/src/backend/tensorflow/trainer.py). No step was made"
            )
        )

    def __next__(self) -> Execution:
        """Give itself once: Keras' ``predict`` collects what an iterator yields before it calls the step function."""
        if self._is_taken:
            raise StopIteration
        self._is_taken = True
        return self


StepFunction: TypeAlias = Callable[[Execution | Iterator[StepData]], TensorNest]
"""What Keras calls for each execution, which returns logs; outside of ``fit``, with an iterator over one batch."""

PredictFunction: TypeAlias = Callable[[Sequence[Execution] | Sequence[StepData]], TensorNest]
"""What Keras calls for each execution of a prediction, which returns outputs."""
