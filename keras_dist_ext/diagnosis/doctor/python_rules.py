"""Judge the functions of Python that a step calls."""

from __future__ import annotations

from keras_dist_ext.diagnosis.doctor.examination import Examination
from keras_dist_ext.diagnosis.doctor.replica_rules import python_is_of_this_worker, stragglers
from keras_dist_ext.findings import Finding

__all__ = ["python_in_step"]

_SHARE = 0.1  # of the time


def python_in_step(examination: Examination) -> list[Finding]:
    """Functions given to `tf.numpy_function` or `tf.py_function` in the step, where they take much of its time."""
    times = examination.times
    assert times is not None
    by_seconds = sorted(times.python, key=lambda calls: -calls.seconds)
    if times.python_seconds < _SHARE * times.seconds or not by_seconds[0].is_even:  # a straggler, if it is uneven
        return []
    if python_is_of_this_worker(examination) and stragglers(examination):  # which name it
        return []
    listed = "; ".join(
        f"{calls.function}, {calls.num_calls / times.num_steps:.3g} calls a step, "
        f"{1e3 * calls.seconds / times.num_steps:.3g} ms a step"
        for calls in by_seconds[:3]
    )
    return [
        Finding(
            "python-in-step",
            "Each step calls Python, for one replica at a time, and waits for it.",
            f"{listed}: {times.python_seconds / times.seconds:.0%} of the time",
            f"write {by_seconds[0].function.partition(' ')[0]} with TensorFlow ops; or call it outside of the step, "
            "in a callback once an epoch, or in the pipeline's map if it needs the data alone",
            times.python_seconds,
        )
    ]
