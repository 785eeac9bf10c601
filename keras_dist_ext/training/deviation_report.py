"""Say in a sentence what a step on replicas makes otherwise than one device, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from keras_dist_ext.training.deviations import Deviation

__all__ = ["describe", "describe_unseen"]

_LISTED = 3  # of each kind, before the rest is counted
_KINDS = {
    "gradient": "the gradient of",
    "weights": "the weights",
    "state": "the state",
    "metric": "the log",
}
_ADVICE = {
    "state": (
        "State that is assigned from examples becomes the mean of what the replicas have assigned: gather the examples "
        "of all replicas first, by kde.gather_rows."
    ),
    "weights": "What assigns weights must be computed from gradients or sums of all replicas.",
    "gradient": (
        "A loss must be a mean or a sum over the examples at hand, or several of them added up, and not be divided by "
        "the number of replicas; where examples meet in it (pairs, a maximum, a quotient of sums), gather those of all "
        "replicas first, by kde.gather_rows."
    ),
    "metric": (
        "What a metric keeps must add up over replicas, as sums and counts do, and a maximum or kept examples do not, "
        "unless kde.gather_rows has gathered the examples; a value in the logs must be a mean or a sum over the "
        "examples at hand."
    ),
}


def describe(
    model: str, num_replicas: int, num_examples: int, deviations: Sequence[Deviation], *, given_to: str = "compile"
) -> str:
    """Describe what differs.

    Args:
        model: its name.
        num_replicas: on which the step was made.
        num_examples: that it was made on.
        deviations: beyond rounding.
        given_to: what takes the argument ``check``.
    """
    by_part = {part: [d for d in deviations if d.part == part] for part in _KINDS}
    if by_part["gradient"]:
        by_part["weights"] = [d for d in by_part["weights"] if d.name not in {e.name for e in by_part["gradient"]}]
    found = [_listed(_KINDS[part], of_part) for part, of_part in by_part.items() if of_part]
    advice = [text for part, text in _ADVICE.items() if by_part[part]]
    if by_part["gradient"] and by_part["metric"]:
        others = [d for d in by_part["metric"] if "loss" not in d.name]
        advice = [text for part, text in _ADVICE.items() if by_part[part] and (part != "metric" or others)]
    return (
        f"'{model}' does not train on {num_replicas} replicas as on one device. One step on {num_examples} examples, "
        f"made both ways from the same state, differs in {'; '.join(found)}. {' '.join(advice)} "
        f'`{given_to}(check=False)` leaves out this check, `check="raise"` makes it an error.'
    )


def describe_unseen(model: str, num_replicas: int, why: str, *, given_to: str = "compile") -> str:
    """Say that a step was not made both ways.

    Args:
        model: its name.
        num_replicas: on which the step runs.
        why: it was not, said of the step.
        given_to: what takes the argument ``check``.
    """
    return (
        f"Whether '{model}' trains on {num_replicas} replicas as on one device was not checked, because of its step: "
        f"{why}. Its losses, metrics and state must be means or sums over the examples at hand. If you know that they "
        f"are, `{given_to}(check=False)` says so."
    )


def _listed(kind: str, deviations: Sequence[Deviation]) -> str:
    worst = sorted(deviations, key=lambda d: -d.excess)
    names = ", ".join(f"{d.name} (by {_percent(d.relative)})" for d in worst[:_LISTED])
    rest = len(worst) - _LISTED
    return f"{kind} {names}{f' and {rest} more' if rest > 0 else ''}"


def _percent(relative: float) -> str:
    return "another shape" if relative == float("inf") else f"{100 * relative:.2g}%"
