"""Say how fast experiments trained, and on how many replicas, beside what a plan had predicted."""

from collections.abc import Mapping

import numpy as np

from keras_dist_ext.aliases import JsonObject
from keras_dist_ext.monitoring.dashboard import wire
from keras_dist_ext.monitoring.dashboard.experiments import parse_manifest
from keras_dist_ext.monitoring.dashboard.metadata import ALL_EXAMPLES_PER_SECOND
from keras_dist_ext.monitoring.dashboard.view import View

__all__ = ["MOST", "trained"]

MOST = 50  # experiments, those written to last: each is a series to read


def trained(manifests: Mapping[View, str | None]) -> list[JsonObject]:
    """Return the replicas, the global batch and the median of examples a second of trainings that say all three.

    Args:
        manifests: of the experiments, as texts.
    """
    found: list[JsonObject] = []
    for view, text in sorted(manifests.items(), key=lambda item: -item[0].experiment.newest.wall):
        if len(found) == MOST:
            break
        name = view.experiment.name
        manifest, _ = parse_manifest(text)
        if manifest is None or name.rpartition("/")[2] == "validation":
            continue
        strategy = manifest.get("strategy")
        num_replicas = strategy.get("num_replicas") if isinstance(strategy, dict) else None
        global_batch = manifest.get("batch_size")
        rates = view.overall(ALL_EXAMPLES_PER_SECOND)
        if not isinstance(num_replicas, int) or not isinstance(global_batch, int) or rates is None:
            continue
        finite = rates.values[np.isfinite(rates.values)]
        if finite.size:
            found.append(
                {
                    "experiment": name,
                    "replicas": num_replicas,
                    "global_batch": global_batch,
                    "examples_per_second": wire.number(float(np.median(finite))),
                }
            )
    return found
