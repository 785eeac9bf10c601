"""Record on the device what each replica does in each step, and fetch it on request.

A step hands its loss, examples and gradients to a ``StepNote`` while it is traced, and leaves what the notes say in a
``StepBuffer``, which has a part beside each replica. There it stays until a ``Recorder`` fetches it. So no step waits
for the host or for another replica's numbers, and steps inside an execution have records of their own.

Letters: n = steps; L = replicas of this worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from keras_dist_ext._keras.tracing import in_xla
from keras_dist_ext.aliases import TensorNest
from keras_dist_ext.step.gradient_values import dense_values
from keras_dist_ext.step.stats import Kind, StepRecords, join_records
from keras_dist_ext.step.step_buffer import (
    MAX_STEPS,
    BufferedSteps,
    BufferSlice,
    ReplicaRecord,
    StepBuffer,
)
from keras_dist_ext.step.step_clocks import as_soon_as, last_of, on_host
from keras_dist_ext.step.untimed_steps import with_all_clocks

__all__ = ["Recorder", "StepNote"]


class StepNote:
    """What a replica says of its step; of several virtual replicas that it carries, each says its part.

    Args:
        gradient_norm: whether to compute the norm of the replica's own gradients.
        on_tpu: whether all is compiled, so that the inside of a step cannot be timed.
        is_sampled: whether the clock is read in some steps only, by who asks for ``last_computed``.
    """

    def __init__(self, gradient_norm: bool = False, *, on_tpu: bool = False, is_sampled: bool = False) -> None:
        self._wants_norm = gradient_norm
        self._on_tpu = on_tpu
        self._is_sampled = is_sampled
        self._parts: dict[int, dict[str, tf.Tensor]] = {}
        self._computed: dict[int, Sequence[tf.Tensor]] = {}  # what is there last of what a part computes
        self._compiled: dict[str, tf.Tensor] = {}

    def loss(self, replica: int, value: tf.Tensor, *, is_logged: bool = False) -> None:
        """Note the loss of a replica.

        Args:
            replica: its number.
            value: a scalar, whose mean over replicas weighted by rows is the loss of the global batch.
            is_logged: whether it is what the log will say; else it is what counts until that comes.
        """
        part = self._here(replica)
        if is_logged or "loss" not in part:
            part["loss"] = tf.cast(value, tf.float32)

    def gradients(self, replica: int, values: Sequence[tf.Tensor], factor: tf.Tensor) -> None:
        """Note a replica's own gradients; they are those of its mean loss once multiplied by ``factor``."""
        part = self._here(replica)
        dense = dense_values(values)
        if self._wants_norm and dense:
            squares = tf.add_n([tf.reduce_sum(tf.square(tf.cast(value, tf.float32))) for value in dense])
            part["norm"] = tf.sqrt(squares) * tf.cast(factor, tf.float32)
        if not (self._on_tpu or in_xla()):
            self._has_computed(replica, dense)

    def _has_computed(self, replica: int, values: Sequence[tf.Tensor]) -> None:
        """Note what shows that a replica has computed."""
        self._computed[replica] = last_of(values)
        if not self._is_sampled:
            self._parts[replica]["computed"] = as_soon_as(on_host(values))

    def _here(self, replica: int) -> dict[str, tf.Tensor]:
        """What was noted in this graph: tensors inside of what XLA compiles are no good outside."""
        return self._compiled if in_xla() and not self._on_tpu else self._parts.setdefault(replica, {})

    def from_compiled(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what was noted inside of a compiled function, to be returned from it: loss and norm."""
        noted, self._compiled = self._compiled, {}
        unknown = tf.constant(float("nan"))
        return noted.get("loss", unknown), noted.get("norm", unknown)

    def put_back(self, replica: int, noted: tuple[tf.Tensor, tf.Tensor]) -> None:
        """Note what a compiled function has returned."""
        self._parts.setdefault(replica, {}).update(zip(("loss", "norm"), noted, strict=True))

    def end(self, replica: int, examples: tf.Tensor, logs: TensorNest) -> None:
        """Note the end of a replica's step.

        Args:
            replica: its number.
            examples: how many it had.
            logs: of the user's step. A tensor "loss" in them counts where there was no other loss.
        """
        part = self._parts.setdefault(replica, {})
        part["examples"] = examples
        loss = logs.get("loss") if isinstance(logs, dict) else None
        if "loss" not in part and loss is not None and len(loss.shape) == 0:
            part["loss"] = tf.cast(loss, tf.float32)
        if replica not in self._computed and not self._on_tpu:
            self._has_computed(replica, [part["loss"]] if "loss" in part else tf.nest.flatten(logs))

    @property
    def last_computed(self) -> list[tf.Tensor]:
        """What is there only when the replica has computed; nothing where its clock was read."""
        return [] if not self._is_sampled else [value for values in self._computed.values() for value in values]

    def record(self) -> ReplicaRecord:
        """Return what the real replica records of its step.

        Numbers of a replica without examples mean nothing.
        """
        parts = list(self._parts.values())
        names = ["loss", "norm"] if self._wants_norm else ["loss"]
        if len(parts) == 1:
            (part,) = parts
            examples: tf.Tensor = part["examples"]
            values = [part.get(name, _UNKNOWN) for name in names]
        else:
            counts = [tf.cast(part["examples"], tf.float32) for part in parts]
            total = examples = tf.add_n(counts)
            values = [_mean([part.get(name, _UNKNOWN) for part in parts], counts, total) for name in names]
            if self._is_sampled:  # where the record is made
                with tf.device("/device:CPU:0"):
                    examples = tf.add_n([part["examples"] for part in parts])
        numbers = [tf.convert_to_tensor(number) for number in (examples, *values)]
        if self._is_sampled:
            return ReplicaRecord(tf.constant(float("nan"), tf.float64), *numbers)
        if self._on_tpu:
            return ReplicaRecord(tf.constant(float("inf")), *numbers)
        computed = [part["computed"] for part in parts]
        computed_at: tf.Tensor = computed[0] if len(computed) == 1 else tf.reduce_max(tf.stack(computed))
        return ReplicaRecord(computed_at, *numbers)


_UNKNOWN = np.float32("nan")


def _mean(values: Sequence[tf.Tensor], counts: Sequence[tf.Tensor], total: tf.Tensor) -> tf.Tensor:
    weighted = [
        tf.where(count > 0, value * count, tf.zeros_like(count)) for value, count in zip(values, counts, strict=True)
    ]
    return tf.math.divide_no_nan(tf.add_n(weighted), total)


class _Pending:
    """Executions whose records were not fetched yet.

    There are thousands where each has one step. So nothing is kept of each that Python's collector of garbage would
    have to look at: the more of that outlives it, the more often it looks at all there is.

    Attributes:
        slices: their records; those that follow each other are one.
        num_steps: of each execution.
        follows: whether each came right after the one before.
        ends: see ``Recorder.add``.
        waits: see there.
        waits_for_others: see there.
    """

    def __init__(self) -> None:
        self.slices: list[BufferSlice] = []
        self.num_steps: list[int] = []
        self.follows: list[bool] = []
        self.ends: list[tf.Tensor | None] = []
        self.waits: list[float] = []
        self.waits_for_others: list[float] = []


class Recorder:
    """Keeps records until they are fetched.

    Attributes:
        gradient_norm: whether steps compute the norm of each replica's gradients.

    Args:
        gradient_norm: see above.
    """

    def __init__(self, *, gradient_norm: bool = False) -> None:
        self.gradient_norm = gradient_norm
        self._pending: dict[Kind, _Pending] = {"train": _Pending(), "test": _Pending()}
        self._fetched: dict[Kind, list[StepRecords]] = {"train": [], "test": []}
        self._num_pending: dict[Kind, int] = {"train": 0, "test": 0}
        self._last_end: dict[Kind, float] = {"train": float("nan"), "test": float("nan")}
        self._waited_ahead: dict[Kind, float] = {"train": 0.0, "test": 0.0}  # for the batch of the next execution
        self._follows: dict[Kind, bool] = {"train": False, "test": False}

    def begin(self) -> None:
        """Note that what comes does not follow what was before: a run begins, or an epoch is over."""
        self._follows = dict.fromkeys(self._follows, False)

    def add(
        self,
        kind: Kind,
        buffer: StepBuffer,
        num_steps: int,
        end: float | tf.Tensor | None = None,
        waited_seconds: float = 0.0,
        waited_for_others: float = 0.0,
    ) -> None:
        """Keep the records of the last execution.

        Args:
            kind: "train" or "test".
            buffer: where it has left them.
            num_steps: how many there are.
            end: when it was over, a scalar of the same clock; None if its last record says so, or if that was when its
                last step was.
            waited_seconds: for the batch of the first step, before it began.
            waited_for_others: seconds until other workers had theirs, before it began.
        """
        if not num_steps:
            return
        pending = self._pending[kind]
        if not pending.slices or not pending.slices[-1].extend(buffer, num_steps):
            pending.slices.append(buffer.last(num_steps))
        pending.num_steps.append(num_steps)
        pending.follows.append(self._follows[kind])
        pending.ends.append(end)
        pending.waits.append(waited_seconds)
        pending.waits_for_others.append(waited_for_others)
        self._follows[kind] = True
        self._num_pending[kind] += num_steps
        if len(pending.waits) >= MAX_STEPS:
            self._fetch_pending(kind)

    def num_pending(self, kind: Kind) -> int:
        """How many steps have not been fetched."""
        return self._num_pending[kind]

    def fetch(self, kind: Kind) -> StepRecords | None:
        """Return the records of all steps since the last call, or None if there were none."""
        self._fetch_pending(kind)
        records, self._fetched[kind] = self._fetched[kind], []
        self._num_pending[kind] = 0
        return join_records(records) if records else None

    def _fetch_pending(self, kind: Kind) -> None:
        pending, self._pending[kind] = self._pending[kind], _Pending()
        if not pending.slices:
            return
        steps = _joined([part.steps for part in pending.slices], gradient_norm=self.gradient_norm)
        last = np.cumsum(pending.num_steps) - 1  # of each execution
        first = np.append(0, last[:-1] + 1)
        end = np.array([np.nan if end is None else float(end) for end in pending.ends])
        end = np.where(np.isnan(end), steps.execution_end[last], end)
        steps = with_all_clocks(steps, first, last, end)
        end_of_step = steps.end.max(axis=1)
        end_of_step_before = np.append(np.nan, end_of_step[:-1])
        is_first = np.zeros(len(end_of_step), bool)
        is_first[first] = True
        # Replica 0 may begin the next step while others update.
        begin = np.where(is_first, steps.begin, np.maximum(steps.begin, end_of_step_before))
        begin = np.minimum(begin, end_of_step)  # no GPU waits for the host to read its clock
        batch_ready = np.clip(steps.batch_ready, begin, end_of_step)
        end = np.fmax(end, end_of_step[last])
        waited_ahead = np.append(self._waited_ahead[kind], end - end_of_step[last])
        end_before = np.append(self._last_end[kind], end[:-1])
        self._waited_ahead[kind], self._last_end[kind] = waited_ahead[-1], end[-1]
        waited_between = begin - end_of_step_before
        waited_between[first] = pending.waits + np.where(pending.follows, waited_ahead[:-1], 0.0)
        waits_for_others = np.array(pending.waits_for_others)
        host = np.where(pending.follows, begin[first] - pending.waits - waits_for_others - end_before, 0.0)
        computed = np.clip(steps.computed, batch_ready[:, None], end_of_step[:, None])
        sync = end_of_step[:, None] - computed
        sync[first] += waits_for_others[:, None]
        has = steps.examples > 0
        norm = None if steps.gradient_norm is None or kind != "train" else np.where(has, steps.gradient_norm, np.nan)
        self._fetched[kind].append(
            StepRecords(
                kind=kind,
                loss=np.where(has, steps.loss, np.nan),
                examples=steps.examples.astype(np.int64),
                gradient_norm=norm,
                input_seconds=batch_ready - begin + waited_between,
                compute_seconds=computed - batch_ready[:, None],
                sync_seconds=sync,
                host_seconds=float(np.fmax(host, 0.0).sum()),
            )
        )


def _joined(parts: Sequence[BufferedSteps], *, gradient_norm: bool) -> BufferedSteps:
    """Return steps as one; some may have norms that only others want."""
    wanted = [name for name in BufferedSteps._fields if gradient_norm or name != "gradient_norm"]
    values = {name: np.concatenate([getattr(part, name) for part in parts]) for name in wanted}
    return BufferedSteps(**values) if gradient_norm else BufferedSteps(**values, gradient_norm=None)
