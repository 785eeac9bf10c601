"""Judge loops over the examples of a batch, in the step."""

from __future__ import annotations

from keras_dist_ext.diagnosis.doctor.examination import Examination
from keras_dist_ext.diagnosis.doctor.units import ms, us
from keras_dist_ext.findings import Finding

__all__ = ["map_loops"]

_SHARE = 0.25  # of the time, for going round alone
_SECONDS = 1e-3  # a step


def map_loops(examination: Examination) -> list[Finding]:
    """Loops of `tf.map_fn` that take long however little they compute."""
    times, loops = examination.times, examination.map_loops
    if times is None or loops is None or examination.setting.runs_eagerly:
        return []
    computing = times.compute()
    turning = min(loops.num_turns * loops.turn_seconds, computing)
    if turning < _SECONDS or turning * times.num_steps < _SHARE * examination.seconds:
        return []
    return [
        Finding(
            "loop-in-step",
            "The step goes through its examples one by one, and each turn costs more than it computes.",
            f"`tf.map_fn` in {', '.join(loops.layers[:3])}, {loops.num_turns} turns a step; one that computes nothing "
            f"takes {us(loops.turn_seconds)} here, forward and back: {ms(turning)} of the {ms(computing)} that a step "
            "computes, at least",
            "Write the function for whole batches, as ops of TensorFlow take them (`tf.norm(x, axis=1)`); or "
            "`tf.vectorized_map(f, x)` instead of `tf.map_fn(f, x)`.",
            turning * times.num_steps,
        )
    ]
