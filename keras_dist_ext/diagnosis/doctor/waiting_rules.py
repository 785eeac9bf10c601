"""Judge how long replicas wait for data and for Python: for input, tracing, and the start of executions.

A judgement is on ratios of medians over blocks of steps, of effects that are large and come again: a run is disturbed
by whatever else the machine does. Where experiments were made, they decide, and their intervals are in the evidence.
Thresholds are named; the shortest waits that count are longer than what a loaded machine adds to a tiny step.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

from keras_dist_ext.diagnosis.doctor.examination import Examination, Times, Traces
from keras_dist_ext.diagnosis.doctor.units import ms
from keras_dist_ext.findings import Finding

__all__ = ["WAITING_RULES", "best_steps_per_execution"]

_INPUT_SHARE = 0.25  # of the time
_INPUT_SECONDS = 1e-3  # a step: tf.data's own calls cost 0.1 ms, and several times that on a busy machine
_ALONE = 0.3  # of the wait: the least that a pipeline takes for a batch that nothing else is done beside
_START_SECONDS = 0.08  # of a pass: beginning small data anew takes some ms, a PyDataset 20 to 60
_START_TIMES = 3.0  # as long as the wait for another batch of the pass
_TRACING_SHARE = 0.1
_TRACED_OFTEN = 5  # times, in a fifth of the executions: other shapes of a last batch are traced once or twice
_HOST_SHARE = 0.3


def _input(examination: Examination) -> list[Finding]:
    """Waiting for data; the reason, where the data's own graph tells it."""
    times, trials = examination.times, examination.trials
    assert times is not None
    shares = [float(b.input_seconds.max()) * b.num_steps / max(b.seconds, 1e-9) for b in times.blocks]
    waited = times.input_seconds
    is_long = waited / times.num_steps >= _INPUT_SECONDS and waited >= _INPUT_SHARE * times.seconds
    if not is_long or float(np.quantile(shares, 0.25)) < _INPUT_SHARE / 2:
        return []
    alone = examination.batch_seconds
    if alone is not None and alone < _ALONE * waited / times.num_steps and not examination.pipeline:
        return []  # what is waited for is something else, such as the end of what the last step has begun
    evidence = (
        f"waiting for input took {ms(waited / times.num_steps)} of {ms(times.seconds / times.num_steps)} a step "
        f"({waited / times.seconds:.0%} of the time)"
    )
    if trials is not None and trials.has("as it was", "data"):
        saved = trials.saved("as it was", than="data")
        if saved.low <= 0 or saved.value < min(_INPUT_SECONDS, 0.5 * waited / times.num_steps):
            return []
        waited = min(times.seconds, saved.value * times.num_steps)
        evidence += f"; on a cached batch a step took {saved.show(' ms', 1e3)} less"
    own_starts = _starts(examination)
    pipeline = [f for f in examination.pipeline if f.code not in {start.code for start in own_starts}]
    if pipeline:
        first, *others = pipeline
        return [
            dataclasses.replace(first, evidence=f"{first.evidence}; {evidence}", seconds=waited),
            *(dataclasses.replace(finding, seconds=None) for finding in others),
        ]
    return [
        Finding(
            "input-bound",
            "Replicas wait for input: steps cannot be faster than the data comes.",
            evidence,
            "Make the data cheaper to produce, or more of it at once: `.cache()` what is the same each epoch, "
            "`.map(..., num_parallel_calls=tf.data.AUTOTUNE)`, `.prefetch(tf.data.AUTOTUNE)`; "
            "`kde.inspect(dataset)` names the slow stage.",
            waited,
        )
    ]


def _starts(examination: Examination) -> list[Finding]:
    """Waiting for the first batch of each pass over the data, where passes are short against it."""
    times = examination.times
    assert times is not None
    starts = times.start_seconds
    usual = times.input_seconds / times.num_steps
    if len(starts) < 2 or float(np.median(starts)) < max(_START_SECONDS, _START_TIMES * usual):
        return []
    seconds = sum(starts)
    if seconds < _INPUT_SHARE * (times.seconds + seconds):
        return []
    evidence = (
        f"the first batch took {ms(float(np.median(starts)))} in each of {len(starts)} passes over the data, with "
        f"{times.num_steps / len(starts):.3g} steps a pass: {seconds / (times.seconds + seconds):.0%} of the time"
    )
    skips = [finding for finding in examination.pipeline if finding.code == "skip-after-map"]
    if skips:  # which each pass begins with
        return [dataclasses.replace(skips[0], evidence=f"{skips[0].evidence}; {evidence}", seconds=seconds)]
    return [
        Finding(
            "slow-start-of-epochs",
            "Each epoch begins the data anew, and replicas wait until its first batch is available.",
            evidence,
            "Make the beginning cheaper: `.cache()` before `shuffle`, if what it gives fits into memory, a smaller "
            "buffer, fewer files at once; or let an epoch continue where the last one ended, in a pass that is longer: "
            "`dataset.repeat()` and `fit(..., steps_per_epoch=n)`.",
            seconds,
        )
    ]


def _retracing(examination: Examination) -> list[Finding]:
    """A function that TensorFlow traces again and again."""
    times = examination.times
    assert times is not None
    return [
        _traced(traces, times)
        for traces in times.traces
        if traces.num_traces >= _TRACED_OFTEN
        and traces.num_executions >= 0.2 * times.num_executions
        and traces.seconds >= _TRACING_SHARE * times.seconds
    ]


def _traced(traces: Traces, times: Times) -> Finding:
    argument = ""
    if traces.argument:
        argument = f": its argument {traces.argument} was another one each time ({', '.join(traces.values[:4])}, ...)"
    return Finding(
        "retracing",
        f"TensorFlow traces {traces.function} again and again, in Python, while replicas wait.",
        f"{traces.num_traces} traces in {traces.num_executions} of {times.num_executions} executions, "
        f"{ms(traces.seconds / traces.num_traces)} each{argument}",
        _trace_once(traces.function, traces.argument, traces.values),
        traces.seconds,
    )


def _trace_once(function: str, argument: str, values: Sequence[str]) -> str:
    """Say how a function is not traced anew for each value of an argument, by what these are."""
    if not argument:
        return (
            f"Make {function} once, outside of what is called for each batch: its arguments were the same each time, "
            "and a tf.function that is made anew knows none of the traces of the one before."
        )
    specs = [_SPEC.fullmatch(value) for value in values]
    if specs and all(specs):
        dtypes = list(dict.fromkeys(spec[2] for spec in specs if spec))
        shapes = [[part.strip() for part in spec[1].split(",") if part.strip()] for spec in specs if spec]
        if len(dtypes) > 1:
            return f"Cast {argument} to one dtype before {function} is called: `tf.cast({argument}, {dtypes[0]})`."
        if len({len(shape) for shape in shapes}) > 1:
            return f"Give {argument} one rank: `tf.reshape({argument}, [...])` before {function} is called."
        shape = [dims[0] if len(set(dims)) == 1 else "None" for dims in zip(*shapes, strict=True)]
        return (
            f"`@tf.function(reduce_retracing=True)`, by which {function} is traced for all shapes of {argument} at "
            f"once; or declare them, `tf.TensorSpec([{', '.join(shape)}], {dtypes[0]})` in `input_signature`; or pad "
            f"{argument} to few lengths, where XLA compiles the function."
        )
    if all(value.startswith("Weakref[") for value in values):
        return (
            f"Call {function} with the same object each time, or hand it the tensors that {argument} holds: a trace is "
            "of one object of Python."
        )
    if all(value.startswith(("List[", "Tuple[", "Dict[")) for value in values):
        return (
            f"Pass {argument} as one tensor, `tf.stack({argument})`, or as a `tf.RaggedTensor`: a trace is of one "
            "number of elements, and of one value of each that is no tensor."
        )
    return (
        f"Pass {argument} as a tensor, `tf.constant(...)`, of a fixed dtype and rank; or declare what comes: "
        "`@tf.function(input_signature=[...])`."
    )


_SPEC = re.compile(r"TensorSpec\(shape=\((.*)\), dtype=(\S+), name=.*\)")  # python/framework/tensor.py


def _host(examination: Examination) -> list[Finding]:
    """Steps that are shorter than what it takes to start them."""
    times, trials, setting = examination.times, examination.trials, examination.setting
    assert times is not None
    per_execution = times.dispatch_seconds / max(1, times.num_executions)
    steps = times.num_steps / max(1, times.num_executions)
    share = times.dispatch_seconds / times.seconds
    if setting.runs_eagerly or share < _HOST_SHARE or times.num_executions < 10:
        return []
    if setting.steps_per_execution is None and not setting.step_watchers:
        return []  # executions are as long already as callbacks can wait
    per_step = (times.seconds - times.host_seconds) / times.num_steps
    best = best_steps_per_execution(per_execution, per_step)
    if best <= steps:
        return []
    evidence = (
        f"starting an execution took {ms(per_execution)}, a step {ms(per_step)}; "
        f"{steps:.3g} to an execution; {share:.0%} of the time"
    )
    seconds = times.dispatch_seconds * (1 - steps / best)
    if trials is not None and trials.has("one step", "many steps"):
        saved = trials.saved("many steps", than="one step")
        if saved.low <= 0:
            return []
        evidence += f"; {trials.num_steps['many steps']} an execution saved {saved.show(' ms', 1e3)} a step"
    better = {calls.name: calls.better for calls in times.calls if calls.better}
    if setting.step_watchers and setting.steps_per_execution is None and better.keys() >= set(setting.step_watchers):
        changed = ", ".join(f"`{name}(..., {better[name]})`" for name in setting.step_watchers)
        fix = f"{changed}, so that {best} steps run at once instead of one by one."
    elif setting.step_watchers and setting.steps_per_execution is None:
        watchers = ", ".join(setting.step_watchers)
        fix = (
            f"Let {watchers} do without every batch, so that {best} steps run at once: use `on_epoch_end`, or derive "
            "the class from `kde.RunCallback` with `supports_multi_step = True`, if it need not see each step."
        )
    else:
        fix = f'`model.compile(..., steps_per_execution={best})`, or "auto"; callbacks then see every {best}th batch.'
    return [
        Finding(
            "host-bound",
            "Steps are so short that starting them from Python takes longer than they do.",
            evidence,
            fix,
            seconds,
        )
    ]


def best_steps_per_execution(host_seconds: float, step_seconds: float) -> int:
    """Return how many steps make the host's share 5%, in executions of at most a quarter of a second.

    >>> best_steps_per_execution(1e-3, 2e-4), best_steps_per_execution(1e-3, 0.5)
    (95, 1)
    """
    step_seconds = max(step_seconds, 1e-6)
    enough = math.ceil(0.95 * host_seconds / (0.05 * step_seconds) - 1e-6)
    return max(1, min(enough, int(0.25 / step_seconds)))


WAITING_RULES: Sequence[Callable[[Examination], list[Finding]]] = (_input, _starts, _retracing, _host)
