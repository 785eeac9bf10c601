"""Say in a sentence what a step on replicas makes otherwise than one device, and what to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from keras_dist_ext.training.deviations import Deviation
from keras_dist_ext.training.execution import RunKind

__all__ = ["describe", "describe_unseen"]

_LISTED = 3  # of each kind, before the rest is counted
_KINDS = {
    "gradient": "the gradient of",
    "weights": "the weights",
    "state": "the state",
    "metric": "the log",
    "output": "the output",
}
_ADVICE = {
    "state": (
        "State that is assigned from examples becomes the mean of what the replicas have assigned, or what the "
        "aggregation of a tf.Variable makes of that: gather the examples of all replicas first, by kde.gather_rows."
    ),
    "weights": (
        "What assigns weights must be computed from gradients or sums of all replicas; a loss or another mean that "
        "scales an update, sets the learning rate or decides must be that of the whole batch: loss = "
        "kde.reduce_gradients(loss)."
    ),
    "gradient": (
        "A loss must be a mean or a sum over the examples at hand, or several of them added up, and not be divided by "
        "the number of replicas; where examples meet in it (pairs, a maximum, the hardest ones), gather those of all "
        "replicas first, by kde.gather_rows; where sums or means do (a quotient, a root, a loss that scales another "
        "or decides), make each that of the whole batch, by kde.reduce_gradients(mean)."
    ),
    "metric": (
        "What a metric keeps must add up over replicas, as sums and counts do, and a maximum or kept examples do not, "
        "unless kde.gather_rows has gathered the examples; a value in the logs must be a mean or a sum over the "
        "examples at hand."
    ),
    "output": (
        "What is predicted for an example from others of its batch must be computed from those of all replicas: gather "
        "them first, by kde.gather_rows."
    ),
}


_VERBS = {
    "train": ("does not train", "trains"),
    "test": ("is not evaluated", "is evaluated"),
    "predict": ("does not predict", "predicts"),
}


def describe(
    model: str,
    kind: RunKind,
    num_replicas: int,
    num_examples: int,
    deviations: Sequence[Deviation],
    *,
    given_to: str = "compile",
    added_up: Collection[str] = (),
    sums_on_read: Sequence[str] = (),
) -> str:
    """Describe what differs.

    Args:
        model: its name.
        kind: of the step.
        num_replicas: on which the step was made.
        num_examples: that it was made on.
        deviations: beyond rounding.
        given_to: what takes the argument ``check``.
        added_up: names of state of which TensorFlow adds up what the replicas assign.
        sums_on_read: names of that of which each replica holds its own part.
    """
    by_part = {part: [d for d in deviations if d.part == part] for part in _KINDS}
    if by_part["gradient"]:
        by_part["weights"] = [d for d in by_part["weights"] if d.name not in {e.name for e in by_part["gradient"]}]
    found = [_listed(_KINDS[part], of_part) for part, of_part in by_part.items() if of_part]
    parts = {part for part in _ADVICE if by_part[part]}
    of_losses = ["loss" in d.name for d in by_part["metric"]]
    if kind == "test" and any(of_losses):
        parts.add("gradient")
    if "gradient" in parts and all(of_losses):
        parts.discard("metric")
    advice = [text for part, text in _ADVICE.items() if part in parts]
    of_sums = [d for d in by_part["state"] if d.name in added_up]
    if of_sums:
        advice.append(
            f"Of what replicas assign to {_first([d.name for d in of_sums])}, TensorFlow makes the sum, so that a "
            "number that all assign alike, such as a count of steps, counts once for each: make it with "
            "aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA, or MEAN."
        )
    if sums_on_read and parts - {"state"}:
        advice.append(
            f"Where the step reads {_first(sums_on_read)}, each replica has its own part of the sum there: read it "
            "after the step, as in a callback; what a step reads is state made by add_weight."
        )
    return (
        f"'{model}' {_VERBS[kind][0]} on {num_replicas} replicas as on one device. One step on {num_examples} "
        f"examples, made both ways from the same state, differs in {'; '.join(found)}. "
        f"{' '.join(advice)} "
        f'`{given_to}(check=False)` leaves out this check, `check="raise"` makes it an error.'
    )


def describe_unseen(model: str, kind: RunKind, num_replicas: int, why: str, *, given_to: str = "compile") -> str:
    """Say that a step was not made both ways.

    Args:
        model: its name.
        kind: of the step.
        num_replicas: on which the step runs.
        why: it was not, said of the step.
        given_to: what takes the argument ``check``.
    """
    return (
        f"Whether '{model}' {_VERBS[kind][1]} on {num_replicas} replicas as on one device was not checked, because of "
        f"its step: {why}. {_RULES[kind == 'predict']}, `{given_to}(check=False)` says so."
    )


_RULES = (
    "Its losses, metrics and state must be means or sums over the examples at hand. If you know that they are",
    "What it gives for an example must not depend on others of its batch. If you know that it does not",
)


def _listed(kind: str, deviations: Sequence[Deviation]) -> str:
    worst = sorted(deviations, key=lambda d: -d.excess)
    names = ", ".join(f"{d.name} (by {_percent(d.relative)})" for d in worst[:_LISTED])
    rest = len(worst) - _LISTED
    return f"{kind} {names}{f' and {rest} more' if rest > 0 else ''}"


def _first(names: Sequence[str]) -> str:
    rest = len(names) - _LISTED
    return f"{', '.join(names[:_LISTED])}{f' and {rest} more' if rest > 0 else ''}"


def _percent(relative: float) -> str:
    return "another shape" if relative == float("inf") else f"{100 * relative:.2g}%"
