"""Loops over a step: what one execution runs, in a graph or as Python."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from keras_dist_ext._keras.tapes import unrecorded_loop
from keras_dist_ext.aliases import StepData, TensorNest
from keras_dist_ext.step.graphs import assigning
from keras_dist_ext.step.step_buffer import StepRecord
from keras_dist_ext.step.step_clocks import now
from keras_dist_ext.step.step_plan import OtherLogs
from keras_dist_ext.strategy.workers import workers_of
from keras_dist_ext.training.batch_clock import after
from keras_dist_ext.training.batch_devices import BatchDevices
from keras_dist_ext.training.batch_split import is_per_replica
from keras_dist_ext.training.distributed_step import DistributedStep

__all__ = ["EagerLoops", "StepLoops"]

TIMED_EVERY = 32
"""Steps of a loop on GPUs of which two are timed, for which they stand still: 170 to 400 us each on one H100, and so 11
to 25 us a step (benchmarks/results/2026-11-28-h100.md)."""


class StepLoops:
    """Loops that are traced; each returns the logs last.

    Args:
        step: that they make.
        devices: where the batches of iterators are.
    """

    def __init__(self, step: DistributedStep, devices: BatchDevices) -> None:
        self._step = step
        self._devices = devices

    # These two take nothing but the batch: a concrete function of TensorFlow 2.16 misses arguments that have defaults.

    def on_batch(self, batch: StepData) -> TensorNest:
        """Run one step on a batch, global or per replica."""
        return self._on_one(batch, of_worker=False)

    def on_rows_of_worker(self, batch: StepData) -> TensorNest:
        """Run one step on examples that only this worker has read."""
        return self._on_one(batch, of_worker=True)

    def _on_one(self, batch: StepData, *, of_worker: bool) -> TensorNest:
        extra, record = self._single(lambda: batch, of_worker=of_worker)
        self._write(record)
        return self._step.logs(extra)

    def one_of_iterator(self, iterator: tf.data.Iterator) -> TensorNest:
        """Run one step on the next batch of an iterator."""
        extra, record = self._single(iterator.get_next)
        self._write(record)
        return self._step.logs(extra)

    def one_of_optional(
        self, iterator: tf.data.Iterator, optional: tf.experimental.Optional
    ) -> tuple[tf.experimental.Optional, tf.Tensor, TensorNest]:
        """Run one step on a batch that was read ahead; return the next one, and whether there is one, too."""
        step = _TracedStep()
        extra, record = self._single(self._devices.beside_data(optional).get_value, is_ahead=True)
        with step.made():
            following = self._devices.beside_data(iterator.get_next_as_optional())
        has_more = following.has_value()
        if record is not None:
            self._write(record._replace(execution_end=now(has_more, independent=True)))
        logs = self._step.logs(extra)
        self._devices.end_trace()
        return following, has_more, logs

    def _single(
        self, pull: Callable[[], StepData], *, of_worker: bool = False, is_ahead: bool = False
    ) -> tuple[list[tf.Tensor], StepRecord | None]:
        """Run the one step of an execution; return what ``DistributedStep.run`` does."""
        self._step.loops = False
        self._step.expect_logs(pull, of_worker=of_worker)
        return self._step.run(*self._timed(pull, is_ahead=is_ahead), of_worker=of_worker)

    def on_iterator(self, iterator: tf.data.Iterator, num_steps: tf.Tensor) -> TensorNest:
        """Run so many steps on the batches of an iterator."""
        self._step.loops = True
        ahead = self._devices.sent_ahead(iterator.element_spec)
        num_sent, num_read = len(ahead.shapes), len(ahead.read_shapes)

        def body(i: tf.Tensor, *others: tf.Tensor) -> tuple[tf.Tensor, ...]:
            step = _TracedStep()
            extra = self._recorded(
                lambda: ahead.batch(others[:num_sent], iterator.get_next),
                is_ahead=bool(num_sent),
                is_timed=self._is_timed(i, num_steps),
            )
            if num_read:
                following = ahead.sent(others[num_sent : num_sent + num_read])
                with step.launched(ahead.replicas, i):
                    following += ahead.read(lambda: i + 2 < num_steps, iterator.get_next)
            else:
                following = ahead.following(lambda: i + 1 < num_steps, iterator.get_next)
            self._devices.end_trace()
            return (i + 1, *following, *extra)

        self._step.expect_logs(iterator.get_next)
        first = ahead.first(iterator.get_next)
        if num_read:
            first += ahead.read(lambda: num_steps > 1, iterator.get_next)
        _, *others = self._loop(
            lambda i, *_: i < num_steps,
            body,
            (tf.constant(0), *first),
            (tf.TensorShape([]), *ahead.shapes, *ahead.read_shapes),
        )
        return self._step.logs(others[num_sent + num_read :])

    def on_optional(
        self, iterator: tf.data.Iterator, optional: tf.experimental.Optional, num_steps: tf.Tensor
    ) -> tuple[int | tf.Tensor, tf.experimental.Optional, tf.Tensor, tf.Tensor | None, TensorNest]:
        """Run up to so many steps, from a batch that was read ahead on; see ``StepProgram.on_optional``."""
        self._step.loops = True
        devices = self._devices
        ahead = devices.sent_ahead(iterator.element_spec)
        num_sent, num_optionals = len(ahead.shapes), 2 if ahead.replicas else 1

        def has_more(i: tf.Tensor, optional: tf.experimental.Optional) -> tf.Tensor:
            return devices.both(i < num_steps, devices.beside_data(optional).has_value())

        def body(i: tf.Tensor, optional: tf.experimental.Optional, *others: TensorNest) -> tuple[TensorNest, ...]:
            upcoming, others = others[: num_optionals - 1], others[num_optionals - 1 :]
            pull = devices.beside_data(optional).get_value
            step = _TracedStep()
            extra = self._recorded(
                lambda: ahead.batch(others[:num_sent], pull), is_ahead=True, is_timed=self._is_timed(i, num_steps)
            )
            if upcoming:
                following = devices.beside_data(upcoming[0])
                with step.launched(ahead.replicas, i):
                    optionals = [following, devices.read_if(lambda: has_more(i + 1, following), iterator)]
            else:
                with contextlib.nullcontext() if num_sent else step.made():
                    following = devices.beside_data(iterator.get_next_as_optional())
                optionals = [following]
            sent = ahead.following(
                lambda: has_more(i + 1, following), lambda: devices.beside_data(following).get_value()
            )
            devices.end_trace()
            return (i + 1, *optionals, *sent, *extra)

        self._step.expect_logs(lambda: optional.get_value())
        first = devices.beside_data(optional)
        optionals = [first] if num_optionals == 1 else [first, devices.read_if(first.has_value, iterator)]
        i, optional, *others = self._loop(
            lambda i, optional, *_: has_more(i, optional),
            body,
            (tf.constant(0), *optionals, *ahead.first(first.get_value)),
            (tf.TensorShape([]), *[tf.OptionalSpec.from_value(optional)] * num_optionals, *ahead.shapes),
        )
        optional = devices.beside_data(optional)
        made, logs = self._report_steps(i), self._step.logs(others[num_optionals - 1 + num_sent :])
        found = made, optional, optional.has_value(), self._when(i), logs
        devices.end_trace()
        return found

    def _loop(
        self,
        has_more: Callable[..., tf.Tensor],
        body: Callable[..., tuple[tf.Tensor, ...]],
        first: Sequence[TensorNest],
        shapes: Sequence[tf.TensorShape | tf.TypeSpec],
    ) -> Sequence[TensorNest]:
        """Trace a loop, which carries what its step's logs hold beside `first`; again, if they hold other numbers."""
        while True:
            extra = self._step.expected_logs()
            try:
                found: Sequence[TensorNest] = unrecorded_loop(
                    has_more,
                    body,
                    (*first, *extra),
                    parallel_iterations=1,
                    shape_invariants=(*shapes, *(tf.TensorShape(None) for _ in extra)),
                )
            except OtherLogs:  # they are expected now
                continue
            return found

    def _report_steps(self, num_made: tf.Tensor) -> tf.Tensor:
        """Have it known how many steps this worker's data has had, while others may wait for it in one more."""
        workers = workers_of(self._step.strategy) if self._step.kind == "train" else None
        if workers is None:
            return num_made
        reported = tf.numpy_function(workers.watch.note_steps, [num_made], num_made.dtype)
        reported.set_shape([])
        return reported

    def _recorded(
        self, pull: Callable[[], StepData], *, is_ahead: bool = False, is_timed: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """Run a step, leave its record in the buffer, and return its part of the logs."""
        extra, record = self._step.run(*self._timed(pull, is_ahead=is_ahead), is_timed=is_timed)
        self._write(record)
        return extra

    def _is_timed(self, i: tf.Tensor, num_steps: tf.Tensor) -> tf.Tensor | None:
        """Whether the clocks of a step of a loop are read; None if they are in all.

        They are in two steps of ``TIMED_EVERY``: when the second could begin, the first has told. So are the last two
        of an execution, at whose end the host waits for the devices anyway.
        """
        if self._step.buffer is None or not self._step.samples_clocks:
            return None
        with tf.device("/device:CPU:0"):
            return tf.logical_or(i % TIMED_EVERY >= TIMED_EVERY - 2, i >= num_steps - 2)

    def _write(self, record: StepRecord | None) -> None:
        """Leave the record of a step in the buffer, if there is one."""
        if self._step.buffer is None or record is None:
            return
        if record.sampled:
            self._step.buffer.write_sampled(record)
        else:
            self._step.buffer.write(record, loops=self._step.loops)

    def _when(self, there: TensorNest) -> tf.Tensor | None:
        """When something was there, if steps are recorded."""
        return None if self._step.buffer is None else now(there)

    def _timed(
        self, pull: Callable[[], StepData], *, is_ahead: bool = False
    ) -> tuple[StepData, tuple[tf.Tensor, tf.Tensor] | None]:
        """Pull a batch; return it with when that began, and when it was there: at once, if it was read ahead."""
        if self._step.buffer is None:
            return pull(), None
        begin = now(independent=True)
        if self._step.samples_clocks:  # a GPU that waits for the host does so until it has done all it was given
            batch = pull()
            is_there = is_ahead or self._devices.are_of_gpu
            return batch, (begin, begin if is_there else now(batch, independent=True))
        with tf.control_dependencies([begin]):
            batch = pull()
        if is_ahead:
            return batch, (begin, begin)
        batch_there = now(batch, independent=True)
        return batch if is_per_replica(batch) else after(batch_there, batch), (begin, batch_there)


class _TracedStep:
    """What is traced after it was made: a step. Its contexts are for ops that wait for it.

    Reading the next batch may fail, which ends at once whatever is under way: so a step is whole, or not begun.
    """

    def __init__(self) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._since = len(self._graph.get_operations())

    def made(self) -> contextlib.AbstractContextManager[None]:
        """Until it has assigned all it does."""
        return _after(*assigning(self._graph, self._since))

    def launched(self, devices: Sequence[str], number: tf.Tensor) -> contextlib.AbstractContextManager[None]:
        """Until GPUs were given all that it assigns, which they then do. Without devices, nothing waits.

        The host learns it from an int32 that is placed on each GPU: TensorFlow has these on the host, so that no GPU is
        stopped, as it would be by an op of the host that comes after one of its own. An op with effects takes them:
        graphs are optimized so that of others the edges alone are left.

        Args:
            devices: GPUs, and
            number: any int32 of at least 0 that is not known while tracing.
        """
        signals, assigned = [], assigning(self._graph, self._since)
        for device in devices:
            with tf.device(device), tf.control_dependencies([op for op in assigned if _may_be_on(op, device)]):
                signals.append(tf.ensure_shape(number, []))
        if not signals:
            return contextlib.nullcontext()
        with tf.device("/device:CPU:0"):
            taken = tf.raw_ops.Assert(condition=functools.reduce(tf.maximum, signals) >= 0, data=[number])
        return _after(taken)


def _after(*ops: tf.Operation) -> contextlib.AbstractContextManager[None]:
    waiting: contextlib.AbstractContextManager[None] = tf.control_dependencies(ops)
    return waiting


def _may_be_on(op: tf.Operation, device: str) -> bool:
    """Whether an op was placed on a device of this process, or nowhere yet."""
    return op.device.rpartition("/")[2] in ("", device.rpartition("/")[2])


class EagerLoops(StepLoops):
    """The same loops, run as Python."""

    def on_iterator(self, iterator: tf.data.Iterator, num_steps: tf.Tensor) -> TensorNest:
        """Run so many steps on the batches of an iterator."""
        extra: list[tf.Tensor] = []
        for _ in range(int(num_steps)):
            extra = self._recorded(lambda: next(iterator))
        return self._step.logs(extra)

    def on_optional(
        self, iterator: tf.data.Iterator, optional: tf.experimental.Optional, num_steps: tf.Tensor
    ) -> tuple[int | tf.Tensor, tf.experimental.Optional, tf.Tensor, tf.Tensor | None, TensorNest]:
        """Run up to so many steps, from a batch that was read ahead on; see ``StepProgram.on_optional``."""
        num_made, extra = 0, []
        while num_made < int(num_steps) and optional.has_value():
            extra = self._recorded(optional.get_value, is_ahead=True)
            optional = iterator.get_next_as_optional()
            num_made += 1
        return num_made, optional, optional.has_value(), self._when(extra), self._step.logs(extra)
