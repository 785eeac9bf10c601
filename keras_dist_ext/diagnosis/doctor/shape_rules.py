"""Judge what the shapes of batches cost: computing for padding, and compiling anew for shapes that are new."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keras_dist_ext.diagnosis.doctor.examination import Examination
from keras_dist_ext.diagnosis.doctor.shapes import Padding, Recompilation
from keras_dist_ext.diagnosis.doctor.units import ms
from keras_dist_ext.findings import Finding

__all__ = ["SHAPE_RULES", "padding_of_stock"]

_SHARE = 0.2  # of the time, for padding alone
_WORTH_SORTING = 1.0  # seconds that are saved in a pass: `bucket_by_length` begins one in 0.1 to 0.2 s
_LONG, _LONG_SECONDS = 5.0, 0.02  # times as long, and longer, than a step whose shape is compiled
_OFTEN = 5  # the shape of a last batch is compiled for once
_COMPILING_SHARE = 0.1  # of the time
_AS_FAST = 1.5  # times as long without XLA as with it: then doing without is the simplest
_LONG_RUN = 100  # times as many steps as were watched: what XLA does not save in so many is not worth compiling


def _padding(examination: Examination) -> list[Finding]:
    """Steps that compute for padding most of the time."""
    padding, times = examination.padding, examination.times
    if padding is None or times is None or not padding.trials.seconds:
        return []
    saved = padding.trials.saved("by length", than="as they come")
    seconds = min(saved.value, times.compute()) * times.num_steps
    if saved.low <= 0 or seconds < _SHARE * examination.seconds:
        return []
    before, after = (padding.trials.seconds[name] for name in ("as they come", "by length"))
    measured = f", and a step took {saved.show(' ms', 1e3)} less: {ms(min(after))} instead of {ms(min(before))}"
    fix = _less_padding(padding, examination.setting.num_replicas, seconds / max(1, len(times.start_seconds)))
    return [_mostly_padding(padding, measured, fix, seconds)]


def padding_of_stock(examination: Examination) -> list[Finding]:
    """Batches that are padding for the most part, where nobody can time steps without it."""
    padding = examination.padding
    if padding is None:
        return []
    fix = _less_padding(padding, examination.setting.num_replicas, 0.0)
    return [_mostly_padding(padding, "; `kde.diagnose(model, data)` times what that saves", fix)]


def _mostly_padding(padding: Padding, measured: str, fix: str, seconds: float | None = None) -> Finding:
    by = f"{padding.stage}: " if padding.stage else ""
    return Finding(
        "mostly-padding",
        f"{padding.share:.0%} of what batches hold is padding, for which each step computes all the same.",
        f"{by}in {padding.num_examples} examples the longest has {padding.longest} places, the mean "
        f"{padding.mean:.3g}; in batches of these examples by their length, {padding.share_by_length:.0%} was padding"
        f"{measured}",
        fix,
        seconds,
    )


def _less_padding(padding: Padding, num_replicas: int, seconds_a_pass: float) -> str:
    where = ", strategy=strategy" if num_replicas > 1 else ""
    size = f"batch_size={padding.batch_size}{where}"
    if not padding.stage:
        return (
            f"Give the sequences as they were before they were padded, lists of arrays or ragged: "
            f"`kde.bucket_by_length((sequences, y), {size})`, which batches those of similar length together and pads "
            "each batch to its own longest."
        )
    ours = f"`kde.bucket_by_length(dataset, {size})`"
    instead = f"instead of `dataset.{padding.stage}`, which batches examples of similar length together"
    if not padding.boundaries:
        return f"{ours} {instead}."
    theirs = _by_tf_data(padding.boundaries, padding.batch_size)
    if seconds_a_pass < _WORTH_SORTING:
        return f"{theirs} {instead}; or {ours}, which takes some 0.2 s to begin a pass, and fills all batches."
    return f"{ours} {instead}; or in tf.data {theirs}."


def _by_tf_data(boundaries: Sequence[int], size: int, *, pads: bool = False) -> str:
    """Buckets of tf.data; a boundary is the first length that is not in its bucket."""
    ends = [str(length + 1) for length in boundaries] + ["longest + 1"] * pads
    more = ", pad_to_bucket_boundary=True, drop_remainder=True" if pads else ""
    return (
        f"`dataset.bucket_by_sequence_length(lambda x, y: tf.shape(x)[0], bucket_boundaries=[{', '.join(ends)}], "
        f"bucket_batch_sizes=[{size}] * {len(ends) + 1}{more})`"
    )


def _recompiling(examination: Examination) -> list[Finding]:
    """A step that XLA compiles again and again, since batches have new shapes."""
    found, times = examination.recompilation, examination.times
    if found is None or times is None:
        return []
    usual = found.compiled_seconds
    long = [each for each in found.step_seconds if each > max(_LONG * usual, usual + _LONG_SECONDS)]
    seconds = sum(long) - usual * len(long)
    if len(long) < _OFTEN or seconds < _COMPILING_SHARE * examination.seconds:
        return []
    plain = f", and {ms(found.plain_seconds)} without XLA" if found.plain_seconds else ""
    return [
        Finding(
            "recompiling",
            "XLA compiles the step anew for each new shape of a batch, while replicas wait "
            f"(jit_compile=True): {len(long)} times.",
            f"{len(long)} of {len(found.step_seconds)} steps took {ms(sum(long) / len(long))}, and one of a shape that "
            f"has been compiled takes {ms(usual)}{plain}; {found.num_batches} batches, read once more, have "
            f"{found.num_shapes} shapes: {'; '.join(found.examples)}, ...",
            _few_shapes(found, seconds / len(long)),
            seconds,
        )
    ]


def _few_shapes(found: Recompilation, compiling_seconds: float) -> str:
    without = "`compile(jit_compile=False)`"
    num_shapes = 1
    if found.only_rows:
        few = f"batches of one size, `dataset.rebatch({found.batch_size}, drop_remainder=True)`"
    elif found.longest and found.stage:
        num_shapes = len(found.boundaries) + 1
        few = f"few lengths, {_by_tf_data(found.boundaries, found.batch_size, pads=True)} instead of "
        few += f"`{found.stage}`, where `longest` is that of all data, {found.longest} or more"
    else:
        few = "few shapes: pad what is new to one of a few lengths, such as the next power of 2, in the pipeline's map"
    plain, compiled = found.plain_seconds, found.compiled_seconds
    takes_longer = (plain - compiled) * len(found.step_seconds)
    if plain and (plain <= _AS_FAST * compiled or _LONG_RUN * takes_longer < num_shapes * compiling_seconds):
        return f"{without}: steps are about as fast without; or keep XLA, and give it {few}."
    return f"Give XLA {few}; or do without, {without}, which compiles nothing and takes longer a step."


SHAPE_RULES: Sequence[Callable[[Examination], list[Finding]]] = (_padding, _recompiling)
