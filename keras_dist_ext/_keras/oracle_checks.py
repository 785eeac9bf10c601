"""Check, before a search, that keras-tuner still calls the private methods of an oracle that are replaced here.

`tests/tuner/test_oracle_checks.py` makes each of them silent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from keras_dist_ext import versions
from keras_dist_ext._keras.keras_tuner import FatalBackendError, keras_tuner
from keras_dist_ext._keras.keras_tuner_oracles import REPLACED, REPLACED_OF, release_lock

__all__ = ["check_oracle"]

_ARGUMENTS: dict[type, dict[str, int]] = {
    keras_tuner.oracles.BayesianOptimizationOracle: {"num_initial_points": 1},
    keras_tuner.oracles.HyperbandOracle: {"max_epochs": 2},
}


def check_oracle(oracle: keras_tuner.Oracle) -> None:
    """Try what keras-tuner's kind of an oracle calls, on a small one; once a process for each kind.

    Raises:
        FatalBackendError: it does not call a method that is replaced (engine/oracle.py, tuners/bayesian.py).
    """
    for kind in REPLACED_OF:
        if isinstance(oracle, kind):
            _check(kind)


@functools.cache
def _check(kind: type) -> None:
    missing, failure = _uncalled(kind)
    if missing:
        raise FatalBackendError(
            versions.changed_tuner(
                f"{kind.__name__} no longer calls {', '.join(missing)} (keras_tuner/src/engine/oracle.py, "
                "keras_tuner/src/tuners), by which keras_dist_ext keeps a search from points that cannot run and its "
                f"project whole{f'; it fails with {failure!r}' if failure else ''}. Nothing was trained"
            )
        ) from failure


class _SeenError(Exception):
    """All were called, and what follows may take long."""


def _uncalled(kind: type) -> tuple[list[str], Exception | None]:
    space = keras_tuner.HyperParameters()
    space.Float("x", 0.0, 1.0)
    objective = keras_tuner.Objective("score", "min")
    oracle = kind(objective=objective, hyperparameters=space, seed=1, **_ARGUMENTS.get(kind, {}))
    oracle.verbose = 0  # else it prints its trials
    called: set[str] = set()

    def noting(name: str) -> Callable[..., object]:
        original = getattr(oracle, name)

        def note(*args: object) -> object:
            called.add(name)
            if called.issuperset(names):
                raise _SeenError
            return None if name in REPLACED else original(*args)

        return note

    names = (*REPLACED, *REPLACED_OF[kind])
    for name in names:
        setattr(oracle, name, noting(name))
    failure: Exception | None = None  # by another change, or because what is called instead wants to write files
    try:
        trial = oracle.create_trial("tuner0")
        oracle.update_trial(trial.trial_id, {"score": 1.0})
        trial.status = "COMPLETED"
        oracle.end_trial(trial)
        oracle.populate_space("1")
    except _SeenError:
        pass
    except Exception as error:
        failure = error
    finally:
        release_lock(oracle)
    return [f"Oracle.{name}" for name in names if name not in called], failure
