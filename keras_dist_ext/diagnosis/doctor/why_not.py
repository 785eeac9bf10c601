"""Say why nothing can be done about what most of a run's time goes to, where no finding is about it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from keras_dist_ext.diagnosis.doctor.examination import Examination
from keras_dist_ext.diagnosis.doctor.units import ms, us

__all__ = ["why_not"]

_MOST = 0.5  # of the time
_ALONE = 0.3  # of the wait for a batch: the least that its pipeline takes by itself where it is what is waited for
_SHORT_SECONDS = 1e-3  # a batch: as of the rule about input
_SELDOM = 0.2  # of the executions
_LONG_SECONDS = 0.2  # an execution: how many steps it has is chosen so that callbacks wait for 0.25 s at most

_ABOUT: dict[str, frozenset[str]] = {  # what the shares are called -> findings that are not about it
    "input": frozenset({"slow-callback", "fetching-callback", "retracing", "host-bound", "sync-bound", "update-bound"}),
    "first batches": frozenset({"slow-callback", "fetching-callback", "retracing", "host-bound", "update-bound"}),
    "updating": frozenset({"slow-callback", "fetching-callback", "retracing", "host-bound", "input-bound"}),
    "synchronising": frozenset({"slow-callback", "fetching-callback", "retracing", "host-bound", "input-bound"}),
    "callbacks": frozenset({"input-bound", "sync-bound", "update-bound", "python-in-step"}),
    "tracing": frozenset({"input-bound", "sync-bound", "update-bound", "python-in-step"}),
    "host": frozenset({"input-bound", "sync-bound", "update-bound", "python-in-step"}),
    "between epochs": frozenset({"input-bound", "sync-bound", "update-bound", "python-in-step", "host-bound"}),
}


def why_not(examination: Examination, codes: Collection[str]) -> str:
    """Return the reason; "" where none is known, most of the time is computing, or a finding says what to do.

    Args:
        examination: of the run.
        codes: of the findings about it.
    """
    shares = examination.shares()
    name = max(shares, key=lambda key: shares[key], default="")
    if not name or shares[name] < _MOST or name not in _ABOUT or set(codes) - _ABOUT[name]:
        return ""
    reason = _REASONS[name](examination)
    return reason and f"nothing is to be gained from the {shares[name]:.0%} {name}: {reason}"


def _of_input(examination: Examination) -> str:
    times, trials, alone = examination.times, examination.trials, examination.batch_seconds
    assert times is not None
    if trials is not None and trials.has("as it was", "data"):
        saved = trials.saved("as it was", than="data")
        return (
            ""
            if saved.low > 0
            else f"on a cached batch steps are not shorter by more than they vary ({saved.show(' ms', 1e3)})"
        )
    waited = times.input_seconds / times.num_steps
    if waited < _SHORT_SECONDS and (alone is None or alone >= _ALONE * waited):
        return f"a batch comes after {us(waited)}, little more than handing one on takes; only larger batches need less"
    if alone is None or alone >= _ALONE * waited:
        return ""
    return f"a batch comes after {ms(waited)}, and the pipeline by itself gives one in {us(alone)}"


def _of_starts(examination: Examination) -> str:
    times = examination.times
    assert times is not None
    starts = times.start_seconds
    return (
        f"beginning a pass over the data takes {ms(sum(starts) / len(starts))}, and one has no more than "
        f"{times.num_steps / len(starts):.3g} steps; only longer ones, `dataset.repeat(n)`, need it less"
    )


def _of_ends(examination: Examination) -> str:
    times = examination.times
    assert times is not None
    what = "the update and the metrics" if "updating" in examination.shares() else "the sum, the update and the metrics"
    return f"{what} take {ms(times.sync())} a step, whatever the batch; only larger batches need them less"


def _of_callbacks(examination: Examination) -> str:
    times = examination.times
    assert times is not None
    worst = max(times.calls, key=lambda calls: calls.seconds)
    if worst.seconds > sum(calls.seconds for calls in times.calls) / 2:
        return ""  # so there is one to be changed
    return (
        f"{len(times.calls)} callbacks share it, and {worst.name} has most, "
        f"{ms(worst.seconds / max(1, worst.num_calls))} a call"
    )


def _of_tracing(examination: Examination) -> str:
    times = examination.times
    assert times is not None
    most = max((traces.num_executions for traces in times.traces), default=0)
    if not most or most >= _SELDOM * times.num_executions:
        return ""
    names = ", ".join(dict.fromkeys(traces.function for traces in times.traces))
    return f"{names} was traced in no more than {most} of {times.num_executions} executions"


def _of_host(examination: Examination) -> str:
    times = examination.times
    assert times is not None
    executions = max(1, times.num_executions)
    num_steps, seconds = times.num_steps / executions, times.seconds / executions
    if seconds < _LONG_SECONDS:
        return ""  # more steps at once would help, if there are more
    steps = "one step" if num_steps < 1.05 else f"{num_steps:.3g} steps"
    return (
        f"an execution, of {steps}, takes {ms(seconds)}, about as long as callbacks can wait, and starting it "
        f"{ms(times.dispatch_seconds / executions)}"
    )


def _of_epochs(examination: Examination) -> str:
    between = examination.between
    assert between is not None
    parts = {"validation": between.validation_seconds, "callbacks": between.callback_seconds}
    parts["ending and beginning epochs"] = max(0.0, between.seconds - sum(parts.values()))
    return "it is shared by " + ", ".join(f"{name}, {ms(s / between.num_times)} a time" for name, s in parts.items())


_REASONS: dict[str, Callable[[Examination], str]] = {
    "input": _of_input,
    "first batches": _of_starts,
    "updating": _of_ends,
    "synchronising": _of_ends,
    "callbacks": _of_callbacks,
    "tracing": _of_tracing,
    "host": _of_host,
    "between epochs": _of_epochs,
}
