"""Say what a prediction takes for granted because nothing was measured of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from keras_dist_ext.diagnosis.doctor.units import ms, size
from keras_dist_ext.diagnosis.plan.measurements import Measurements
from keras_dist_ext.diagnosis.plan.scaling import Curve
from keras_dist_ext.diagnosis.plan.step_costs import Devices, StepCosts

__all__ = ["assumptions_of"]

_MISFIT = 0.1  # of the line, that is worth a word
_OFF = 0.15  # of the step of one replica


def assumptions_of(
    measured: Measurements, costs: StepCosts, curves: Sequence[Curve], devices: Devices
) -> tuple[str, ...]:
    """Return the assumptions, in sentences.

    Args:
        measured: what is known.
        costs: what it came to.
        curves: that were predicted.
        devices: see ``StepCosts.predict``.
    """
    return tuple(_sentences(measured, costs, curves, devices))


def _sentences(measured: Measurements, costs: StepCosts, curves: Sequence[Curve], devices: Devices) -> Iterator[str]:
    one = costs.predict(1, measured.batch_size).seconds
    if measured.run_seconds is not None and abs(one / measured.run_seconds - 1) > _OFF:
        yield (
            f"One replica was predicted to take {ms(one)} a step, and took {ms(measured.run_seconds)} in the run on "
            "its own data: something else takes time, such as other processes, or a pipeline on the cores that compute."
        )
    points = [point for curve in curves for point in curve.points]
    has_several = any(point.num_replicas > 1 for point in points)
    if has_several and devices == "own":
        yield f"Each replica has a device like {measured.device} here, and as many cores for itself."
    if has_several and devices == "shared":
        yield (
            f"All replicas share the {measured.num_cores} cores of this machine, of which one replica kept "
            f"{costs.cores_busy:.2g} busy."
        )
    if has_several and measured.link is None:
        yield (
            f"No network was measured or given, so the sum of {size(measured.gradient_bytes)} of gradients over "
            "replicas is left out: several replicas are slower than this. Give network, such as '10Gb/s, 50us'."
        )
    if has_several and measured.link is not None:
        link = measured.link
        shape = "added up in memory" if link.in_memory else "sent around a ring"
        yield (
            f"Gradients of {size(measured.gradient_bytes)} are {shape}, at {size(link.bytes_per_second)}/s and "
            f"{1e6 * link.latency_seconds:.3g} µs a message ({link.source}), when all of them are there."
        )
        if measured.sums is None and not link.latency_seconds:
            yield "A message takes no time but that of its bytes: no latency was given."
        if measured.sums is not None:
            most = max(measured.sums.seconds)
            if most < measured.gradient_bytes:
                yield f"Sums were measured up to {size(most)}; beyond, seconds grow with bytes."
            if not link.in_memory and any(point.num_replicas > measured.sums.num_replicas for point in points):
                yield f"Sums were measured on {measured.sums.num_replicas} replicas; more pass theirs around a ring."
    if has_several and costs.input_per_example:
        yield (
            f"Each process reads whole global batches and takes its own examples, at {ms(costs.input_per_example)} an "
            "example, as one process does here."
        )
    beyond = sorted({point.batch_per_replica for point in points if not point.is_measured})
    if beyond:
        yield (
            f"Steps were measured with {int(costs.sizes[0])} to {int(costs.sizes[-1])} examples; those of "
            f"{', '.join(map(str, beyond))} continue the line."
        )
    if len(costs.sizes) == 1:
        yield "Steps were measured with one number of examples, so nothing of them is taken to be fixed."
    if costs.misfit > _MISFIT:
        yield (
            f"Seconds do not grow evenly with examples: a line misses them by up to {costs.misfit:.0%}. Between sizes "
            "that were measured, what lies next to them counts."
        )
    if not measured.peak_bytes:
        yield (
            f"The memory of {measured.device} was not measured, since it does not tell: weights and optimizer take "
            f"{size(measured.state_bytes)}, gradients {size(measured.gradient_bytes)}, activations come on top."
        )
