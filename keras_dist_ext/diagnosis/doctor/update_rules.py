"""Judge the update of a step: what the optimizer does to variables, whatever the batch."""

from __future__ import annotations

import math

from keras_dist_ext.diagnosis.doctor.examination import Examination, Largest
from keras_dist_ext.diagnosis.doctor.units import ms, size
from keras_dist_ext.findings import Finding

__all__ = ["long_updates"]

_SHARE = 0.4
_SECONDS = 2e-3  # a step
_LEAST_BYTES = 8_000_000  # of what is trained: smaller ones are updated in less, on any device


def long_updates(examination: Examination) -> list[Finding]:
    """Updates that take longer than computing what they are made of, since there are many weights for few examples."""
    times, trials, setting = examination.times, examination.trials, examination.setting
    assert times is not None
    largest = setting.largest
    if largest is None or setting.runs_eagerly or setting.gradient_bytes < _LEAST_BYTES:
        return []
    updating = times.sync() - sum(metric.seconds for metric in examination.parts.metrics)
    computing = times.compute()
    if trials is not None and trials.has("as it was", "no sum"):
        updating -= max(0.0, trials.saved("no sum").value)
    elif not setting.sums_in_memory:
        return []  # nobody can tell the update from the sum
    if updating < max(computing, _SHARE * times.step(), _SECONDS):
        return []
    seconds = updating * times.num_steps
    rows = float(times.examples.sum()) / times.num_steps
    evidence = (
        f"computing took {ms(computing)} a step of {rows:.3g} examples, and what {largest.optimizer} does to "
        f"{size(setting.gradient_bytes)} of weights {ms(updating)}, whatever the batch "
        f"({seconds / times.seconds:.0%} of the time); {largest.variable} has {size(largest.num_bytes)} of them"
    )
    if largest.num_rows:
        evidence += f", in {largest.num_rows:,} rows, of which a batch reads a few"
    return [
        Finding(
            "update-bound",
            f"Updating the weights takes longer than computing their gradients, above all {largest.variable}.",
            evidence,
            _fix(largest, rows, _times_the_batch(updating, computing)),
            seconds,
        )
    ]


def _times_the_batch(updating: float, computing: float) -> int:
    """Return by how much a batch must grow for computing to take at least as long as the update: a power of two.

    It is 16 at least, since computing grows by less than a batch of few examples, which leaves cores and the units of
    each core idle; and 64 at most, since a learning rate follows a batch only so far.

    >>> [_times_the_batch(18e-3, computing) for computing in (1e-2, 1e-3, 1e-6)]
    [16, 32, 64]
    """
    return int(min(64, max(16, 2 ** math.ceil(math.log2(updating / max(computing, 1e-9))))))


def _fix(largest: Largest, rows: float, times: int) -> str:
    fewer = (
        f"a larger batch, such as {round(times * rows):,} examples instead of {rows:.3g}, with a learning rate to "
        f"match; or `keras.optimizers.{largest.optimizer}(gradient_accumulation_steps=4)`, which updates once in 4 "
        "batches"
    )
    if largest.num_rows:
        return (
            f"An optimizer that writes only the rows that a batch has read: `keras.optimizers.SGD(...)` without "
            f"momentum, where {largest.optimizer} writes all {largest.num_rows:,}; or {fewer}."
        )
    return f"Update less often: {fewer}."
