"""Say why nothing can be done about what most of a run's time goes to, where no finding is about it."""

from __future__ import annotations

from collections.abc import Collection

from keras_dist_ext.diagnosis.doctor.examination import Examination
from keras_dist_ext.diagnosis.doctor.units import ms, us

__all__ = ["why_not"]

_MOST = 0.5  # of the time

_ABOUT: dict[str, frozenset[str]] = {  # what the shares are called -> findings that are not about it
    "input": frozenset({"slow-callback", "fetching-callback", "retracing", "host-bound", "sync-bound", "update-bound"}),
    "updating": frozenset({"slow-callback", "fetching-callback", "retracing", "host-bound", "input-bound"}),
    "synchronising": frozenset({"slow-callback", "fetching-callback", "retracing", "host-bound", "input-bound"}),
    "callbacks": frozenset({"input-bound", "sync-bound", "update-bound", "python-in-step"}),
    "tracing": frozenset({"input-bound", "sync-bound", "update-bound", "python-in-step"}),
    "host": frozenset({"input-bound", "sync-bound", "update-bound", "python-in-step"}),
}


def why_not(examination: Examination, codes: Collection[str]) -> str:
    """Return the reason, or "" where most of the time is computing, or a finding says what to do.

    Args:
        examination: of the run.
        codes: of the findings about it.
    """
    shares = examination.shares()
    name = max(shares, key=lambda key: shares[key], default="")
    if not name or shares[name] < _MOST or name not in _ABOUT or set(codes) - _ABOUT[name]:
        return ""
    reason = _reason(name, examination)
    return f"nothing is to be gained from the {shares[name]:.0%} {name}: {reason}"


def _reason(name: str, examination: Examination) -> str:
    times, trials = examination.times, examination.trials
    assert times is not None
    step, per_step = times.step(), 1 / times.num_steps
    if name == "input":
        if trials is not None and trials.has("as it was", "data"):
            return f"on a cached batch a step took {trials.saved('as it was', than='data').show(' ms', 1e3)} less"
        waited, alone = times.input_seconds * per_step, examination.batch_seconds
        if alone is not None and alone < 0.3 * waited:
            return f"a batch comes after {ms(waited)}, and the pipeline by itself gives one in {us(alone)}"
        return f"a batch comes after {ms(waited)}, about what handing one over takes; only larger batches need it less"
    if name in ("updating", "synchronising"):
        what = "the update and the metrics" if name == "updating" else "the sum, the update and the metrics"
        return f"{what} take {ms(times.sync())} a step, whatever the batch; only larger batches need them less"
    if name == "callbacks":
        worst = max(times.calls, key=lambda calls: calls.seconds)
        return (
            f"{len(times.calls)} callbacks share it, and {worst.name} has most, "
            f"{ms(worst.seconds / max(1, worst.num_calls))} a call"
        )
    if name == "tracing":
        names = ", ".join(dict.fromkeys(traces.function for traces in times.traces)) or "a function"
        return f"{names} was traced for shapes that do not come again; a longer run has no more of it"
    executions = max(1, times.num_executions)
    return (
        f"an execution of {times.num_steps / executions:.3g} steps of {ms(step)} is as long as callbacks can wait, and "
        f"starting one takes {ms(times.dispatch_seconds / executions)}"
    )
