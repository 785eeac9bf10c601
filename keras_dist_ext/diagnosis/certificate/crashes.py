"""Say why a step does not run under a strategy, where that is known."""

from __future__ import annotations

import re

import tensorflow as tf

from keras_dist_ext.diagnosis.certificate.root_causes import FIX_OF_STOCK
from keras_dist_ext.findings import Finding
from keras_dist_ext.strategy.scope import describe_strategy

__all__ = ["crash_finding"]


def crash_finding(error: Exception, strategy: tf.distribute.Strategy, what: str, *, is_ours: bool) -> Finding:
    """Name a step that does not run under the strategy, and why, where that is known."""
    # TensorFlow puts the stack of the node before what went wrong, and the node behind it.
    text = " ".join(re.sub(r"(?s)Detected at node.*?\n\n(?=\S)", "", str(error)).partition("[[{{node")[0].split())
    known = None
    if not is_ours:
        known = next(((code, why) for pattern, code, why in _KNOWN_CRASHES if re.search(pattern, text)), None)
    code, why = known or ("does-not-run", "It runs on one device.")
    return Finding(
        code=code,
        what=f"{what} ends with {type(error).__name__} under {describe_strategy(strategy)}. {why}",
        evidence=text[-300:] or "the error has no message",
        fix=_FIXES.get(code) or ("Please report this model: it should not be." if is_ours else FIX_OF_STOCK),
    )


_FIXES = {"strategies-collide": "Certify in a process of its own, with one strategy."}
_KNOWN_CRASHES = (
    (
        r"Collective ops is aborted|in the collective instance",
        "strategies-collide",
        "TensorFlow's collectives take this strategy for another one of the same devices, with which this process has "
        "trained before (tensorflow#62790).",
    ),
    (
        r"AddN|same size and shape|Attempt to convert a value \(PerReplica|Unsupported.*(string|bool)",
        "fit-averages-a-batch",
        "Stock Keras builds a model from the mean of the first batch over the replicas, which there is only of numbers "
        "in parts of equal size.",
    ),
    (
        r"You must feed a value for placeholder",
        "steps-per-execution",
        "Stock Keras loops over several steps in a way that TensorFlow cannot run on several devices.",
    ),
    (
        r"called while defining a new graph",
        "reduction-in-a-condition",
        "Stock optimizers that accumulate gradients, or overwrite weights by their mean, reduce over replicas inside a "
        "condition, which TensorFlow cannot do.",
    ),
    (
        r"located in device .* from device|Trying to access resource",
        "jit-compile",
        "XLA cannot compile a step that spans devices: jit_compile=True is for one.",
    ),
    (
        r"Mixing different tf.distribute|colocate_vars_with",
        "outside-of-the-scope",
        "Something was built outside of the strategy's scope: `kde.check_scope(model, strategy)` names it.",
    ),
)
