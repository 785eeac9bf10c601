"""Record on the device what each replica does in each step, and fetch it when it is asked for.

A step hands its loss, examples and gradients to a ``StepNote`` while it is traced; the loop over steps collects what
the notes say on a tape; each execution leaves its tape with the ``Recorder``, where it stays until ``fetch``. So no
step waits for the host, and steps inside an execution have records of their own.

Letters: n = steps; L = replicas of this worker; C = numbers of each in a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_dist_ext import _keras
from keras_dist_ext.stats import Kind, StepRecords, join_records

__all__ = ["Recorder", "StepNote", "now", "row", "tape", "when_updated"]

# A row is: when the step began, when its batch was there, when it was over; then C numbers of each replica: when it had
# computed, its rows, its loss, and the norm of its gradients if that is wanted.
_NUM_TIMES = 3
_MOST_PENDING = 1000  # executions; older ones are fetched before they are asked for


def now(after: Any = ()) -> tf.Tensor:
    """Read the host's clock once ``after`` is there, in seconds since 1970, float64."""
    values = [value for value in tf.nest.flatten(after) if tf.is_tensor(value)]
    with tf.control_dependencies(values), tf.device(_host_of(values)):
        return tf.timestamp()


def _host_of(values: Sequence[Any]) -> str:
    """The values' own device, if it is a CPU: what is on another one has to be sent to it."""
    device = getattr(values[0], "device", "") if values else ""
    return device if "CPU" in device.upper() else "/device:CPU:0"


class StepNote:
    """What a replica says of its step; of several virtual replicas that it carries, each says its part.

    Args:
        gradient_norm: whether to compute the norm of the replica's own gradients.
        on_tpu: whether all is compiled, so that the inside of a step cannot be timed.
    """

    def __init__(self, *, gradient_norm: bool = False, on_tpu: bool = False) -> None:
        self._wants_norm = gradient_norm
        self._on_tpu = on_tpu
        self._parts: dict[int, dict[str, Any]] = {}
        self._compiled: dict[str, Any] = {}

    def loss(self, replica: int, value: Any, *, is_logged: bool = False) -> None:
        """Note the loss of a replica.

        Args:
            replica: its number.
            value: a scalar, whose mean over replicas weighted by rows is the loss of the global batch.
            is_logged: whether it is what the log will say; else it is what counts until that comes.
        """
        part = self._here(replica)
        if is_logged or "loss" not in part:
            part["loss"] = tf.cast(value, tf.float32)

    def gradients(self, replica: int, values: Sequence[Any], factor: Any) -> None:
        """Note a replica's own gradients; they are those of its mean loss once multiplied by ``factor``."""
        part = self._here(replica)
        dense = [value.values if isinstance(value, tf.IndexedSlices) else value for value in values]
        if self._wants_norm and dense:
            squares = tf.add_n([tf.reduce_sum(tf.square(tf.cast(value, tf.float32))) for value in dense])
            part["norm"] = tf.sqrt(squares) * tf.cast(factor, tf.float32)
        if not (self._on_tpu or _keras.in_xla()):
            part["computed"] = _as_soon_as(_on_host(dense))

    def _here(self, replica: int) -> dict[str, Any]:
        """What was noted in this graph: tensors inside of what XLA compiles are no good outside."""
        return self._compiled if _keras.in_xla() and not self._on_tpu else self._parts.setdefault(replica, {})

    def from_compiled(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what was noted inside of a compiled function, to be returned from it: loss and norm."""
        noted, self._compiled = self._compiled, {}
        unknown = tf.constant(float("nan"))
        return noted.get("loss", unknown), noted.get("norm", unknown)

    def put_back(self, replica: int, noted: tuple[tf.Tensor, tf.Tensor]) -> None:
        """Note what a compiled function has returned."""
        self._parts.setdefault(replica, {}).update(zip(("loss", "norm"), noted, strict=True))

    def end(self, replica: int, rows: Any, made: Any) -> None:
        """Note the end of a replica's step.

        Args:
            replica: its number.
            rows: how many it had.
            made: the logs of the user's step. A tensor "loss" in them counts where there was no other loss.
        """
        part = self._parts.setdefault(replica, {})
        part["rows"] = rows
        loss = made.get("loss") if isinstance(made, dict) else None
        if "loss" not in part and loss is not None and len(loss.shape) == 0:
            part["loss"] = tf.cast(loss, tf.float32)
        if "computed" not in part and not self._on_tpu:
            part["computed"] = _as_soon_as(_on_host([part["loss"]] if "loss" in part else tf.nest.flatten(made)))

    def column(self, *, is_alone: bool) -> tuple[tf.Tensor, ...]:
        """Return the record of the real replica; see above. Numbers of a replica without rows mean nothing.

        Args:
            is_alone: whether this worker has no other. Its C scalars stay as they are then; else they are one tensor
                [C], to be sent to where the record of a step is put together.
        """
        scalars = self._scalars()
        if is_alone:
            return scalars
        with contextlib.nullcontext() if self._on_tpu else tf.device(_host_of(scalars)):
            return (tf.stack(scalars),)

    def _scalars(self) -> tuple[tf.Tensor, ...]:
        parts = list(self._parts.values())
        names = ["loss", "norm"] if self._wants_norm else ["loss"]
        if len(parts) == 1:
            (part,) = parts
            rows: Any = part["rows"]
            values = [part.get(name, _UNKNOWN) for name in names]
        else:
            counts = [tf.cast(part["rows"], tf.float32) for part in parts]
            total = tf.add_n(counts)
            rows = total
            values = [_mean([part.get(name, _UNKNOWN) for part in parts], counts, total) for name in names]
        values = [tf.convert_to_tensor(value) for value in values]
        if self._on_tpu:
            return tf.constant(float("inf")), tf.cast(rows, tf.float32), *values
        computed = [part["computed"] for part in parts if "computed" in part]
        if not computed:
            computed_at: Any = tf.constant(float("inf"), tf.float64)
        else:
            computed_at = computed[0] if len(computed) == 1 else tf.reduce_max(tf.stack(computed))
        with tf.device(_host_of([computed_at])), tf.control_dependencies([computed_at]):  # no sooner: see ``row``
            return computed_at, *(tf.cast(number, tf.float64) for number in (rows, *values))


def _as_soon_as(values: Sequence[Any]) -> tf.Tensor:
    """Read the clock once values are there, whether or not other replicas have theirs."""
    there = now(values)
    if values:
        _keras.run_in_any_order(there)
    return there


_UNKNOWN = np.float32("nan")


def _mean(values: Sequence[Any], counts: Sequence[Any], total: Any) -> Any:
    weighted = [
        tf.where(count > 0, value * count, tf.zeros_like(count)) for value, count in zip(values, counts, strict=True)
    ]
    return tf.math.divide_no_nan(tf.add_n(weighted), total)


def _on_host(values: Sequence[Any]) -> list[Any]:
    """Return tensors that are there only when ``values`` are computed, not just enqueued."""
    if not values or all("CPU" in getattr(value, "device", "CPU").upper() or not value.device for value in values):
        return list(values)
    with tf.device("/device:CPU:0"):  # work of a GPU is done in order: the last value waits for all before it
        return [tf.identity(tf.reshape(value, [-1])[:1]) for value in (values[0], values[-1])]


def row(begin: Any, batch_there: Any, over: Any, columns: Sequence[Sequence[Any]]) -> tf.Tensor:
    """Return the record of a step, [3 + L C].

    It is put together when all else is done: where something short can be done beside something long, TensorFlow's
    executor hands one of them to another thread, and that one contends for the cores for a while.

    Args:
        begin: when it began.
        batch_there: when its batch was there.
        over: when it was over, where what follows is not the next step; else NaN.
        columns: what each of the L replicas has noted, see ``StepNote.column``.
    """
    with tf.device("/device:CPU:0"), tf.control_dependencies([over]):
        times = [begin, batch_there, over]
        if len(columns) == 1:
            return tf.stack([tf.cast(number, tf.float64) for number in (*times, *columns[0])])
        return tf.concat([tf.stack(times), *(tf.cast(column, tf.float64) for (column,) in columns)], axis=0)


def when_updated(graph: Any, since: int) -> tf.Tensor:
    """Read the clock once what a step assigns is assigned.

    Args:
        graph: where the step was traced.
        since: how many ops it had before.
    """
    updates = [op for op in graph.get_operations()[since:] if op.type.startswith(_ASSIGNING)]
    with tf.control_dependencies(updates), tf.device("/device:CPU:0"):
        return tf.timestamp()


_ASSIGNING = ("Assign", "Resource", "If", "While", "StatefulPartitionedCall", "CollectiveReduce")


def tape(num_steps: Any, num_local: int, *, gradient_norm: bool) -> tf.TensorArray:
    """Return what a loop in a graph carries the rows of its steps in."""
    num_columns = 4 if gradient_norm else 3
    with tf.device("/device:CPU:0"):
        return tf.TensorArray(tf.float64, size=num_steps, element_shape=[_NUM_TIMES + num_columns * num_local])


class Recorder:
    """Keeps records until they are fetched.

    Attributes:
        gradient_norm: whether steps compute the norm of each replica's gradients.

    Args:
        gradient_norm: see above.
    """

    def __init__(self, *, gradient_norm: bool = False) -> None:
        self.gradient_norm = gradient_norm
        self._pending: dict[Kind, list[tuple[Any, Any, int, float, bool]]] = {"train": [], "test": []}
        self._fetched: dict[Kind, list[StepRecords]] = {"train": [], "test": []}
        self._num_pending: dict[Kind, int] = {"train": 0, "test": 0}
        self._last_end: dict[Kind, float | None] = {"train": None, "test": None}
        self._waited_ahead: dict[Kind, float] = {"train": 0.0, "test": 0.0}  # for the batch of the next execution

    def begin(self) -> None:
        """Note that what comes does not follow what was before: a run begins, or an epoch is over."""
        for kind in self._pending:
            self._fetch_pending(kind)
            self._last_end[kind] = None
            self._waited_ahead[kind] = 0.0

    def add(
        self, kind: Kind, rows: Any, num_steps: int, end: Any, *, waited_seconds: float = 0.0, has_norm: bool = False
    ) -> None:
        """Keep the records of an execution.

        Args:
            kind: "train" or "test".
            rows: float64 [n or more, 3 + L C], a tensor.
            num_steps: n.
            end: when the execution was over, a scalar of the same clock.
            waited_seconds: for the batch of the first step, before it began.
            has_norm: whether C is 4, with the norm of gradients, or 3.
        """
        if num_steps:
            self._pending[kind].append((rows, end, num_steps, waited_seconds, has_norm))
            self._num_pending[kind] += num_steps
            if len(self._pending[kind]) >= _MOST_PENDING:
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
        pending, self._pending[kind] = self._pending[kind], []
        for rows, end, num_steps, waited_seconds, has_norm in pending:
            table, end = rows.numpy()[:num_steps], float(end)
            begin, batch_there, over = table[:, 0], table[:, 1], table[:, 2]
            next_begin = np.append(begin[1:], end)
            over = np.where(np.isnan(over), next_begin, over)
            before = self._waited_ahead[kind] + waited_seconds
            waited = batch_there - begin + np.append(before, (next_begin - over)[:-1])
            self._waited_ahead[kind] = float(end - over[-1])
            last = self._last_end[kind]
            host = 0.0 if last is None else max(0.0, float(begin[0]) - waited_seconds - last)
            self._last_end[kind] = end
            columns = table[:, _NUM_TIMES:].reshape(num_steps, -1, 4 if has_norm else 3).transpose(0, 2, 1)
            computed = np.clip(columns[:, 0], batch_there[:, None], over[:, None])
            has = columns[:, 1] > 0
            norm = np.where(has, columns[:, 3], np.nan) if self.gradient_norm and kind == "train" else None
            self._fetched[kind].append(
                StepRecords(
                    kind=kind,
                    loss=np.where(has, columns[:, 2], np.nan),
                    examples=columns[:, 1].astype(np.int64),
                    gradient_norm=norm,
                    input_seconds=waited,
                    compute_seconds=computed - batch_there[:, None],
                    sync_seconds=over[:, None] - computed,
                    host_seconds=host,
                )
            )
