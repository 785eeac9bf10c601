"""Judge the dtype that a model computes with, on the device that it has."""

from __future__ import annotations

from keras_dist_ext.diagnosis.doctor.examination import Examination
from keras_dist_ext.diagnosis.doctor.units import ms
from keras_dist_ext.findings import Finding

__all__ = ["slow_dtypes"]

_TIMES = 1.5  # as long as float32
_SHARE = 0.2  # of the time, that float32 would save


def slow_dtypes(examination: Examination) -> list[Finding]:
    """A dtype in which the device takes longer than in float32."""
    times, speed = examination.times, examination.dtype
    if times is None or speed is None or examination.setting.runs_eagerly:
        return []
    ratio = speed.seconds / max(speed.float32_seconds, 1e-9)
    seconds = times.compute() * times.num_steps * speed.share * (1 - 1 / max(ratio, 1.0))
    if ratio < _TIMES or seconds < _SHARE * examination.seconds:
        return []
    if speed.dtype == "float64":
        fix = (
            '`keras.config.set_floatx("float32")`, or `dtype="float32"` of the layers, and data of float32, '
            '`x.astype("float32")`, unless more than seven digits count.'
        )
    else:
        fix = (
            'Here, float32: leave out `keras.mixed_precision.set_global_policy(...)`, or set it to "float32". '
            "16 bits are faster on TPUs, and on GPUs from compute capability 7.0 up."
        )
    return [
        Finding(
            "slow-dtype",
            f"The model computes in {speed.dtype}, in which {speed.device} takes longer than in float32.",
            f"a {speed.operation} with its gradients took {ms(speed.seconds)}, and in float32 "
            f"{ms(speed.float32_seconds)}; about {speed.share:.0%} of the model is computed in {speed.dtype}",
            fix,
            seconds,
        )
    ]
