"""Search hyperparameters with keras-tuner, the strategy among them: each trial lives under its own.

    tuner = kde.tuner.RandomSearch(build_model, objective="val_loss", strategies=["one_device", "mirrored"])
    tuner.search(x, y, validation_data=validation, epochs=5)
    tuner.strategy_report()

Importing this package imports neither TensorFlow nor keras-tuner: each name below loads its module when it is first
used. Without keras-tuner that says how to install it: the extra `keras_dist_ext[tuner]`.

In reading order: `search` is the mixin and the tuners; `strategies`, `coupled` and `objectives` are what a search is
told; `scoped` builds a trial's model; `trial_run` follows a trial, with `meter`, `failures`, `records`, `trial_logs`
and `leftovers`; `avoidance` keeps the oracle from what cannot run; `first_pass` and `strategy_report` compare
strategies. `processes` runs a search over several processes: `parallel` divides the machine, `place`, `part`, `chief`,
`remote_oracle` and `channel` are what the processes do, `crew` and `supervisor` what the launcher does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_dist_ext.tuner.coupled import Coupled
    from keras_dist_ext.tuner.first_pass import FirstPass
    from keras_dist_ext.tuner.objectives import cost, examples_per_second, seconds_to
    from keras_dist_ext.tuner.processes.launch_search import SearchRun, launch_search
    from keras_dist_ext.tuner.search import (
        BayesianOptimization,
        GridSearch,
        Hyperband,
        RandomSearch,
        StrategySearch,
        with_strategies,
    )
    from keras_dist_ext.tuner.strategy_report import StrategyReport

__all__ = [
    "RandomSearch",
    "BayesianOptimization",
    "Hyperband",
    "GridSearch",
    "with_strategies",
    "StrategySearch",
    "Coupled",
    "examples_per_second",
    "seconds_to",
    "cost",
    "FirstPass",
    "StrategyReport",
    "launch_search",
    "SearchRun",
]

_MODULE_OF = {
    "RandomSearch": "search",
    "BayesianOptimization": "search",
    "Hyperband": "search",
    "GridSearch": "search",
    "with_strategies": "search",
    "StrategySearch": "search",
    "Coupled": "coupled",
    "examples_per_second": "objectives",
    "seconds_to": "objectives",
    "cost": "objectives",
    "FirstPass": "first_pass",
    "StrategyReport": "strategy_report",
    "launch_search": "processes.launch_search",
    "SearchRun": "processes.launch_search",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
