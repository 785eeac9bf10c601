"""Judge single parts of a step that take much of it: metrics, and what single layers do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from keras_dist_ext.diagnosis.doctor.examination import Examination
from keras_dist_ext.diagnosis.doctor.parts import Looped, Metered, OneHot, RecurrentDropout
from keras_dist_ext.diagnosis.doctor.trials import Trials
from keras_dist_ext.diagnosis.doctor.units import ms, us
from keras_dist_ext.findings import Finding

__all__ = ["PART_RULES"]

_Part = TypeVar("_Part", Metered, OneHot, RecurrentDropout)

_SHARE = 0.25  # of the time
_SECONDS = 5e-4  # a step
_LOOP_SHARE = 0.4  # of a step, that is the loop's
_TURNS = 4.0  # times as long as one that computes nothing: longer ones compute
_SLOWER = 1.3  # times as long with channels first
_LAYOUT_SHARE = 0.2  # of the time, that channels last would save
_FASTER = 1.25  # times as fast when XLA compiles it: less proves nothing


def _metrics(examination: Examination) -> list[Finding]:
    """Metrics that take much of a step."""
    found = []
    for metric, seconds in _costly(examination.parts.metrics, examination):
        called = f"{metric.kind}({metric.argument})" if metric.argument else f"'{metric.name}' ({metric.kind})"
        once = (
            "leave it out of `compile`, or of a loop's step, and compute it once an epoch, in `on_epoch_end` of a "
            "callback, of what `model.predict` gives for the validation data"
        )
        fix = f"`keras.metrics.{metric.kind}({metric.better})`, the default; or {once}." if metric.better else ""
        found.append(
            Finding(
                "costly-metric",
                f"The metric {called} takes much of each step.",
                _evidence(metric.trials),
                fix or f"Make it cheaper, or {once}.",
                seconds,
            )
        )
    return found


def _loops(examination: Examination) -> list[Finding]:
    """Layers whose call goes round in a loop of turns that cost more than they compute."""
    return [_loop(loop, examination) for loop in examination.parts.loops if _needs_no_loop(loop, examination)]


def _needs_no_loop(loop: Looped, examination: Examination) -> bool:
    """Whether a loop takes much of the time, and either XLA or the time of a turn shows that it need not."""
    times = examination.times
    assert times is not None
    if not loop.trials.has("as it was", "without") or not loop.num_turns:
        return False
    saved = loop.trials.saved("without")
    if saved.low < _LOOP_SHARE * statistics.median(loop.trials.seconds["as it was"]) or saved.low < _SECONDS:
        return False
    if saved.value * times.num_steps < _SHARE * examination.seconds:
        return False
    if loop.trials.has("compiled"):
        return loop.trials.ratio("as it was", "compiled").low >= _FASTER
    return saved.value / loop.num_turns <= _TURNS * loop.turn_seconds


def _loop(loop: Looped, examination: Examination) -> Finding:
    times = examination.times
    assert times is not None
    what = f"layer {loop.layer}" if loop.layer else "loss"
    saved, whole = loop.trials.saved("without"), statistics.median(loop.trials.seconds["as it was"])
    evidence = (
        f"without {loop.layer or 'the loss'} a step took {saved.show(' ms', 1e3)} less, of {ms(whole)}: "
        f"{loop.num_turns:.3g} turns of {us(saved.value / loop.num_turns)}, forward and back; one that computes "
        f"nothing takes {us(loop.turn_seconds)} here"
    )
    if loop.trials.has("compiled"):
        saved = loop.trials.saved("compiled")
        evidence += f"; compiled by XLA, a step took {saved.show(' ms', 1e3)} less"
        one = "`compile(jit_compile=True)`, by which XLA makes one program of the loop"
    else:
        one = (
            "a Python loop, `for i in range(n)`, where n is small and known; or one that XLA can compile, "
            "`tf.while_loop(..., maximum_iterations=n)` and `compile(jit_compile=True)`"
        )
    return Finding(
        "loop-in-step",
        f"The {what} goes round in a loop, and each turn costs more than it computes.",
        evidence,
        "Where no turn needs the one before, ops that take all of them at once: `tf.vectorized_map(f, x)`, "
        f"`tf.cumsum(x, 1)`, `x @ w`. Where one does, {one}.",
        min(saved.value * times.num_steps, examination.seconds),
    )


def _one_hots(examination: Examination) -> list[Finding]:
    """Dense layers that multiply one-hot vectors."""
    found = []
    for each, seconds in _costly(examination.parts.one_hots, examination):
        rows, columns = each.num_rows, each.num_columns
        found.append(
            Finding(
                "one-hot-product",
                f"The layer {each.layer} multiplies one-hot vectors of {rows:,} numbers by its kernel, which is to "
                "take one of its rows.",
                _evidence(each.trials),
                f"`keras.layers.Embedding({rows}, {columns})` of the numbers, instead of `one_hot` and "
                f"{each.layer}: it takes the rows.",
                seconds,
            )
        )
    return found


def _recurrent_dropouts(examination: Examination) -> list[Finding]:
    """Recurrent layers whose dropout within the recurrence takes much of a step."""
    found = []
    for each, seconds in _costly(examination.parts.recurrent_dropouts, examination):
        found.append(
            Finding(
                "recurrent-dropout",
                f"{each.kind}(recurrent_dropout={each.rate:g}) computes each time step of {each.layer} gate by gate, "
                "in small products.",
                _evidence(each.trials),
                f"`keras.layers.{each.kind}(..., dropout={each.rate:g})`, which drops inputs, or a `Dropout` after the "
                "layer; on GPUs cuDNN runs the loop of a layer without recurrent dropout alone.",
                seconds,
            )
        )
    return found


def _summaries(examination: Examination) -> list[Finding]:
    """Summaries that each step writes."""
    summaries = examination.parts.summaries
    seconds = 0.0 if summaries is None else _saved(summaries.trials, examination)
    if summaries is None or not seconds:
        return []
    listed = ", ".join(summaries.tags) + (", ..." if summaries.num_written > len(summaries.tags) else "")
    number = "a summary" if summaries.num_written == 1 else f"{summaries.num_written} summaries"
    return [
        Finding(
            "summaries-in-step",
            f"Each step writes {number} (tf.summary), and waits for it.",
            f"{listed}: {_evidence(summaries.trials)}",
            "Write at some steps alone: `with tf.summary.record_if(self.optimizer.iterations % 100 == 0):` around the "
            "calls; or once an epoch, in a callback, such as `keras.callbacks.TensorBoard(..., histogram_freq=1)`.",
            seconds,
        )
    ]


def _layouts(examination: Examination) -> list[Finding]:
    """Convolutions whose channels come first, which a CPU computes more slowly."""
    times, layout = examination.times, examination.parts.layout
    assert times is not None
    if layout is None or examination.setting.runs_eagerly:
        return []
    ratio = layout.first_seconds / max(layout.last_seconds, 1e-9)
    seconds = times.compute() * times.num_steps * layout.share * (1 - 1 / max(1.0, ratio))
    if ratio < _SLOWER or seconds < _LAYOUT_SHARE * examination.seconds:
        return []
    return [
        Finding(
            "slow-layout",
            f"The channels of images come first, for which {layout.device} takes longer than for channels last.",
            f"a convolution like {layout.layer}, with its gradients, took {ms(layout.first_seconds)}, and with "
            f"channels last {ms(layout.last_seconds)}; about {layout.share:.0%} of the model are such convolutions",
            '`keras.config.set_image_data_format("channels_last")`, or `data_format="channels_last"` of the layers, '
            "and images to match, `tf.transpose(x, [0, 2, 3, 1])`.",
            seconds,
        )
    ]


def _evidence(trials: Trials) -> str:
    saved, whole = trials.saved("without"), statistics.median(trials.seconds["as it was"])
    return f"without it a step took {saved.show(' ms', 1e3)} less, of {ms(whole)}, on the same batch"


def _costly(parts: Sequence[_Part], examination: Examination) -> Iterator[tuple[_Part, float]]:
    """Yield the parts that take much of the run, with the seconds that leaving each out saves."""
    for part in parts:
        seconds = _saved(part.trials, examination)
        if seconds:
            yield part, seconds


def _saved(trials: Trials, examination: Examination) -> float:
    """Return the seconds of the run that leaving a part out saves; 0 where that is little."""
    times = examination.times
    assert times is not None
    saved = trials.saved("without") if trials.has("as it was", "without") else None
    if saved is None or saved.low < _SECONDS or saved.value * times.num_steps < _SHARE * examination.seconds:
        return 0.0
    return min(saved.value * times.num_steps, examination.seconds)


PART_RULES: Sequence[Callable[[Examination], list[Finding]]] = (
    _metrics,
    _loops,
    _one_hots,
    _recurrent_dropouts,
    _summaries,
    _layouts,
)
