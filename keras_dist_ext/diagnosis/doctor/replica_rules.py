"""Judge what replicas compute, and how long they wait for each other: shards, stragglers, sums, recurrences.

A judgement is on ratios of medians over blocks of steps, of effects that are large and come again: a run is disturbed
by whatever else the machine does. Where experiments were made, they decide, and their intervals are in the evidence.
Thresholds are named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from keras_dist_ext.diagnosis.doctor.examination import Examination, Floats, Times
from keras_dist_ext.diagnosis.doctor.units import ms, size, us
from keras_dist_ext.findings import Finding

__all__ = ["REPLICA_RULES"]

_SLOW = 1.5  # times as long a step as the median of the other replicas
_SLOW_ON_SHARED_CPU = 3.0  # there, who is given a core first is ahead: twice as long is what taking turns does,
_SLOW_SECONDS_ON_SHARED_CPU = 8e-3  # and who loses its core waits for some time slices of others, of about 4 ms
_UNEQUAL = 1.25  # times as many examples as the mean
_UNEQUAL_SHARE = 0.05  # of the time, that the others wait for it
_SYNC_SECONDS = 2e-3
_SYNC_SHARE = 0.4
_FEW_ROWS = 8  # a replica, in a step
_GOOD_ROWS = 128  # a replica: what does not depend on them is a small part of a step then
_FIXED_SECONDS = 5e-4  # a step, that do not depend on its rows
_LONG_LOOP = 100  # time steps
_SMALL_CELL = 5e6  # floating point operations of a time step, forward and back: less than its loop costs
_NEARLY_FREE = 1.3  # times as long a step with twice the rows


def _shards(examination: Examination) -> list[Finding]:
    """Replicas with more examples than others."""
    times = examination.times
    assert times is not None
    examples = times.examples
    if len(examples) < 2 or not examples.any():
        return []
    ratio = float(examples.max() / examples.mean())
    per_step = examples / times.num_steps
    if ratio < _UNEQUAL or per_step.max() - per_step.min() <= 1 or _rows(times) < 1:
        return []  # that one has a row more than another is a matter of the batch
    seconds = _seconds_unequal(times)
    if seconds < _UNEQUAL_SHARE * times.seconds:
        return []
    return [
        Finding(
            "unequal-shards",
            f"Replica {int(examples.argmax())} has {ratio:.2f} times as many examples as the mean; the others wait.",
            "examples a step: "
            + ", ".join(f"replica {i} {value:.3g}" for i, value in enumerate(per_step[:8]))
            + ("" if len(per_step) <= 8 else ", ..."),
            "Hand `fit` a plain dataset with global batches, which is split evenly; or shard before batching, by "
            "examples and not by files: `dataset.shard(num_workers, index).batch(rows, drop_remainder=True)`.",
            seconds,
        )
    ]


def _seconds_unequal(times: Times) -> float:
    """Return the seconds that replicas with the mean number of examples wait for the one with most."""
    return times.compute() * times.num_steps * (1 - float(times.examples.mean() / times.examples.max()))


def stragglers(examination: Examination) -> list[Finding]:
    """A replica, or a worker, that takes longer than the others for as much work."""
    times, setting = examination.times, examination.setting
    assert times is not None
    if len(times.examples) < 2 or len(times.blocks) < 4:
        return []
    if setting.shares_cpu and len(setting.devices) > setting.num_cores:
        return []  # they take turns on the cores: who comes last is no straggler
    limit, least = (_SLOW_ON_SHARED_CPU, _SLOW_SECONDS_ON_SHARED_CPU) if setting.shares_cpu else (_SLOW, 0.0)
    own = np.array([b.input_seconds + b.compute_seconds for b in times.blocks])  # [P, R]
    busy = times.examples > 0
    if busy.sum() < 2:
        return []
    own[:, ~busy] = np.nan
    slow = [
        replica
        for replica in np.flatnonzero(busy).tolist()
        if _is_slow(own, replica, limit, least) and not _has_more(times, replica)
    ]
    local = setting.num_replicas // setting.num_workers
    workers = sorted({replica // local for replica in slow})
    others = np.delete(own, slow, axis=1)
    if not slow or len(slow) == busy.sum():
        return []
    lost = np.maximum(0.0, np.nanmax(own[:, slow], axis=1) - np.nanmax(others, axis=1))
    seconds = float(sum(lost * [b.num_steps for b in times.blocks]))
    if seconds < 0.1 * times.seconds:
        return []
    names = f"replica {slow[0]}" if len(slow) == 1 else f"replicas {', '.join(map(str, slow))}"
    if setting.num_workers > 1 and len(slow) == local * len(workers):
        noun = "worker" if len(workers) == 1 else "workers"
        names = f"{noun} {', '.join(map(str, workers))} ({names})"
    slowest, typical = float(np.median(own[:, slow[0]])), float(np.median(np.nanmedian(others, axis=1)))
    waiting = float(np.median([b.input_seconds[slow[0]] for b in times.blocks]))
    evidence = (
        f"{ms(slowest)} a step ({ms(waiting)} of it waiting for input), the others {ms(typical)}, with as many examples"
    )
    fix = (
        "Look at what else runs on that device or machine, at its cooling and its storage; take it out, or give it "
        "fewer examples."
    )
    if python_is_of_this_worker(examination):
        most = max(times.python, key=lambda calls: calls.seconds)
        evidence += f"; here each step calls Python, {most.function}, for {ms(times.python_seconds / times.num_steps)}"
        fix = f"Write {most.function.partition(' ')[0]} with TensorFlow ops, or see why it takes longer here. {fix}"
    return [
        Finding(
            "straggler",
            f"{names[0].upper()}{names[1:]} {'is' if len(slow) == 1 else 'are'} slow: "
            f"{slowest / typical:.2f} times as long a step as the others, which wait.",
            evidence,
            fix,
            seconds,
        )
    ]


def python_is_of_this_worker(examination: Examination) -> bool:
    """Whether Python takes longer in a step of this worker than a replica of another one takes for all of its step."""
    times = examination.times
    assert times is not None
    if examination.setting.num_workers < 2 or not times.python or not times.blocks:
        return False
    own = np.array([b.input_seconds + b.compute_seconds for b in times.blocks])[:, times.examples > 0]
    return bool(times.python_seconds / times.num_steps > np.median(own, axis=0).min())


def _is_slow(own: Floats, replica: int, limit: float, least: float) -> bool:
    """Whether a replica takes that many times, and seconds, more than the median of the others in 3 of 4 blocks."""
    others = np.nanmedian(np.delete(own, replica, axis=1), axis=1)
    return float(np.mean(own[:, replica] > np.maximum(limit * others, others + least))) >= 0.75


def _has_more(times: Times, replica: int) -> bool:
    others = np.delete(times.examples, replica)
    return float(times.examples[replica]) > 1.1 * float(np.median(others[others > 0]) if others.any() else 0)


def _sums(examination: Examination) -> list[Finding]:
    """Summing gradients takes longer than computing them: for want of rows, or for their size."""
    times, trials, setting = examination.times, examination.trials, examination.setting
    assert times is not None
    if setting.num_replicas < 2 or setting.runs_eagerly:
        return []
    fixed, computing, rows = times.sync(), times.compute(), _rows(times)
    if rows < 0.75:
        return [_starved(times)]
    is_long = fixed >= computing and fixed >= _SYNC_SHARE * times.step() and fixed >= _SYNC_SECONDS
    if setting.shares_cpu and setting.num_workers == 1 and (trials is None or not trials.has("as it was", "no sum")):
        is_long = False  # they add up in memory: unless an experiment shows it, what takes long is the update
    evidence = (
        f"a replica computed for {ms(computing)}; the sum over {setting.num_replicas} replicas, the update and the "
        f"metrics took {ms(fixed)}, whatever the batch"
    )
    seconds = fixed * times.num_steps
    if trials is not None and trials.has("as it was", "no sum"):
        saved, base = trials.saved("no sum"), float(np.median(trials.seconds["as it was"]))
        is_long = is_long and saved.low > 0 and saved.value >= 0.2 * base
        evidence += f"; without the sum a step took {saved.show(' ms', 1e3)} less"
        seconds = max(0.0, saved.value) * times.num_steps
    if rows <= _FEW_ROWS:
        return _too_small(examination, fixed, is_long=fixed >= max(_SYNC_SHARE * times.step(), _FIXED_SECONDS))
    if not is_long:
        return []
    rate = setting.gradient_bytes / max(fixed, 1e-9)
    half = ""
    sends_bytes = not setting.sums_in_memory  # else there are none to halve
    if sends_bytes and all(device.startswith("CPU") for device in setting.devices):  # GPUs add up no bfloat16
        half = '; or half the bytes, `model.compile(..., gradient_compression="bfloat16")`'
    return [
        Finding(
            "sync-bound",
            "Replicas synchronise for longer than they compute.",
            f"{evidence}; {size(setting.gradient_bytes)} of gradients a step, {size(rate)} a second",
            "Synchronise less: a larger batch; gradient accumulation, which sums once in k batches, "
            f"`keras.optimizers.Adam(gradient_accumulation_steps=4)`{half}.",
            seconds,
        )
    ]


def _starved(times: Times) -> Finding:
    examples = times.examples
    per_step = examples.sum() / times.num_steps
    return Finding(
        "batch-too-small",
        f"A global batch of {per_step:.3g} examples is less than one a replica: some compute nothing.",
        f"{len(examples)} replicas; examples a step: " + ", ".join(f"{n / times.num_steps:.3g}" for n in examples[:8]),
        f"Raise the global batch to {len(examples) * _GOOD_ROWS} examples or more (`batch_size=`, `.batch(...)`), or "
        "use fewer replicas.",
        (times.compute() + times.sync()) * times.num_steps * (1 - per_step / len(examples)),
    )


def _too_small(examination: Examination, fixed: float, *, is_long: bool) -> list[Finding]:
    times, trials = examination.times, examination.trials
    assert times is not None
    rows, replicas = _rows(times), len(times.examples)
    per_step = times.examples / times.num_steps
    listed = f"{rows:.3g}" if np.ptp(per_step) < 0.5 else ", ".join(f"{n:.3g}" for n in per_step[:8])
    evidence = f"{listed} examples a replica; a step computes for {ms(times.compute())} and takes {ms(times.step())}"
    saved = fixed / 2  # of each batch, by putting two together
    unequal = _seconds_unequal(times)
    if per_step.max() >= _UNEQUAL * rows and unequal >= _UNEQUAL_SHARE * times.seconds:
        is_long, saved = True, max(saved, unequal / times.num_steps)
    if trials is not None and trials.has("as it was", "double"):
        ratio = trials.ratio("double")
        if ratio.high >= 2 - (2 - _NEARLY_FREE) / 2:
            return []
        is_long = is_long or ratio.high < _NEARLY_FREE
        evidence += f"; with twice the examples it took {ratio.show()} times as long"
        saved = times.step() * max(0.0, 1 - ratio.value / 2)
    if not is_long:
        return []
    return [
        Finding(
            "batch-too-small",
            f"The batch is too small for {replicas} replicas: what does not depend on its examples takes most "
            "of a step.",
            evidence,
            f"Raise the global batch from {rows * replicas:.3g} to {replicas * _GOOD_ROWS} examples or more "
            "(`batch_size=`, `.batch(...)`), with a learning rate to match; or use fewer replicas.",
            saved * times.num_steps,
        )
    ]


def _loops(examination: Examination) -> list[Finding]:
    """A long recurrence of small steps."""
    times, trials, setting = examination.times, examination.trials, examination.setting
    assert times is not None
    rows, computing = max(1.0, _rows(times)), times.compute()
    long = [loop for loop in setting.loops if loop.num_steps >= _LONG_LOOP]
    small = [loop for loop in long if 6.0 * loop.parameters * rows < _SMALL_CELL]
    if not small or computing < 0.5 * times.step():
        return []
    total = sum(loop.num_steps for loop in small)
    if computing / total > 5e-3:  # something else takes the time
        return []
    evidence = ", ".join(f"{loop.layer} makes {loop.num_steps} time steps" for loop in small[:3])
    evidence += f", one after the other: {us(computing / total)} each, {ms(computing)} in all"
    if trials is not None and trials.has("as it was", "double"):
        ratio = trials.ratio("double")
        if ratio.low > 1.6:
            return []
        evidence += f"; with twice the examples a step took {ratio.show()} times as long"
    return [
        Finding(
            "sequential-model",
            "The model is sequential: its time steps wait for each other, and more replicas do not shorten them.",
            evidence,
            "Give each replica more examples, which cost little here; shorten the sequence (`x[:, ::2]`, or chunks "
            "with `stateful=True`); or take layers that see all time steps at once: `Conv1D`, `MultiHeadAttention`. On "
            "GPUs keep `LSTM` and `GRU` at their defaults, so that cuDNN runs the loop.",
            computing * times.num_steps,
        )
    ]


def _rows(times: Times) -> float:
    """Return the rows that a replica has in a step, on the mean."""
    return float(times.examples.mean()) / max(1, times.num_steps)


REPLICA_RULES: Sequence[Callable[[Examination], list[Finding]]] = (_shards, stragglers, _sums, _loops)
