"""Judge what is done between epochs, while all replicas wait: validation, callbacks, and ending and beginning them."""

from __future__ import annotations

import math

from keras_dist_ext.diagnosis.doctor.examination import BetweenEpochs, Calls, Examination
from keras_dist_ext.diagnosis.doctor.units import ms
from keras_dist_ext.findings import Finding

__all__ = ["between_epochs"]

_VALIDATION_SHARE = 0.5  # of the time: most programs validate on a quarter of their data or less
_CALLBACK_SHARE = 0.25
_CALLBACK_SECONDS = 0.01  # a call
_OVERHEAD_SHARE = 0.5
_OVERHEAD_SECONDS = 2e-3  # an epoch
_OVERHEAD_TIMES = 20  # between epochs: with fewer, the run is short
_GOOD_SHARE = 0.1  # of the time, that is left where the fix is followed
_SELDOM = 20  # epochs: more seldom, nobody sees how training goes
_LONG = 100  # times as long an epoch
_SAVES = ("ModelCheckpoint", "BackupAndRestore")  # at the ends of epochs, or in the midst, step by step


def between_epochs(examination: Examination) -> list[Finding]:
    """Validation, callbacks at the ends of epochs, and epochs of few steps."""
    between = examination.between
    if between is None or not between.num_times or examination.times is None:
        return []
    return [
        *_validation(examination, between),
        *(finding for calls in between.calls for finding in _callback(calls, examination)),
        *_overhead(examination, between),
    ]


def _validation(examination: Examination, between: BetweenEpochs) -> list[Finding]:
    seconds, total = between.validation_seconds, examination.seconds
    if seconds < _VALIDATION_SHARE * total:
        return []
    every = min(_SELDOM, _seldom(seconds, total - seconds))
    return [
        Finding(
            "long-validation",
            "Validation takes much of the time, and no weight changes meanwhile.",
            f"{ms(seconds / between.num_times)} after each epoch: {seconds / total:.0%} of the time",
            f"`fit(..., validation_freq={every})`, which validates after every {every} epochs; or a part of the data, "
            "`validation_steps=n`; or larger batches of it, which need no memory for gradients.",
            seconds * (1 - 1 / every),
        )
    ]


def _callback(calls: Calls, examination: Examination) -> list[Finding]:
    seconds, total = calls.seconds, examination.seconds
    is_long = seconds >= max(_CALLBACK_SHARE * total, _CALLBACK_SECONDS * calls.num_calls)
    if calls.is_keras_own or not calls.num_calls or not is_long:
        return []
    every = min(_SELDOM, _seldom(seconds, total - seconds))
    return [
        Finding(
            "slow-epoch-end",
            f"The callback {calls.name} is slow between epochs; all replicas wait meanwhile.",
            f"{calls.name}.{calls.hook} took {ms(seconds / calls.num_calls)} a call, {calls.num_calls} times: "
            f"{seconds / total:.0%} of the time",
            f"Make epochs {every} times as long, `fit(dataset.repeat({every}), epochs=...)`, to save less often."
            if calls.name in _SAVES
            else f"`{calls.name}(histogram_freq={every})` instead of {calls.argument}, or 0, which writes none."
            if calls.argument.startswith("histogram_freq")
            else f"Let it work after every {every} epochs, `if epoch % {every}: return`; where it predicts or "
            "evaluates, on fewer examples, in larger batches, `predict(x, batch_size=1024)`.",
            seconds * (1 - 1 / every),
        )
    ]


def _overhead(examination: Examination, between: BetweenEpochs) -> list[Finding]:
    """What ending an epoch and beginning another one takes, with the wait for its first batch."""
    times = examination.times
    assert times is not None
    own = between.seconds - between.validation_seconds - sum(c.seconds for c in between.calls if not c.is_keras_own)
    seconds, total = max(0.0, own) + sum(times.start_seconds), examination.seconds
    if between.num_times < _OVERHEAD_TIMES or seconds < max(
        _OVERHEAD_SHARE * total, _OVERHEAD_SECONDS * between.num_times
    ):
        return []
    longer = min(_LONG, _seldom(seconds, times.seconds))
    return [
        Finding(
            "short-epochs",
            "Epochs are so short that ending one and beginning the next takes longer than their steps.",
            f"{times.num_steps / (between.num_times + 1):.3g} steps an epoch; between them, and until a first batch is "
            f"there, pass {ms(seconds / between.num_times)}: {seconds / total:.0%} of the time",
            f"Make epochs {longer} times as long, and as many times fewer, `fit(dataset.repeat({longer}), "
            "epochs=...)`, by which callbacks and validation come as many times less often.",
            seconds * (1 - 1 / longer),
        )
    ]


def _seldom(seconds: float, rest: float) -> int:
    """Return how many times less often something must come to take no more than a tenth of the time.

    >>> _seldom(1.0, 9.0), _seldom(9.0, 1.0), _seldom(1.0, 1.0)
    (2, 81, 9)
    """
    return max(2, math.ceil(seconds * (1 / _GOOD_SHARE - 1) / max(rest, 0.01 * seconds) - 1e-9))
