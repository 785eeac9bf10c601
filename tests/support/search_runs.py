"""Searches that tests/tuner/test_tuner_processes.py starts over several processes: small models, real digits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

UNITS = (3, 4, 5, 6, 7, 8)


def digits() -> tuple[Any, Any]:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x[:256] / 16).astype("float32"), y[:256]


def search(
    folder: str,
    *,
    kind: str = "RandomSearch",
    strategies: Any = "one_device",
    doom: dict[str, Any] | None = None,
    epochs: int = 2,
    screening: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Search, and return what the chief finds.

    Args:
        folder: of the project, and of what the processes leave for the test.
        kind: the tuner.
        strategies: of the trials.
        doom: who dies where, see `_Digits`.
        epochs: of each trial.
        screening: its rules, if there is to be one.
        options: of the tuner.
    """
    import keras_dist_ext as kde  # noqa: F401 - the launcher hears of this process
    from keras_dist_ext import tuner as tuners
    from keras_dist_ext.tuner.processes.process_role import process_role
    from keras_dist_ext.tuner.processes.screening_lease import ScreeningLease

    ScreeningLease.LEASE_SECONDS = 300.0  # who measures may take long to start again on a busy machine

    role = process_role()
    if role is not None and role.is_chief:
        Path(folder, "chief.pid").write_text(str(os.getpid()))
    tuner = getattr(tuners, kind)(
        _digits(folder, doom or {}),
        objective="val_loss",
        strategies=strategies,
        screening=None if screening is None else tuners.Screening(**screening),
        directory=folder,
        project_name="project",
        seed=7,
        **options,
    )
    x, y = digits()
    tuner.search(x[:192], y[:192], validation_data=(x[192:], y[192:]), epochs=epochs, batch_size=32, verbose=0)
    best = tuner.get_best_models()[0]
    trials = tuner.oracle.trials
    return {
        "trials": {
            name: (trial.status, trial.message, trial.hyperparameters.get("units")) for name, trial in trials.items()
        },
        "end_order": tuner.oracle.end_order,
        "best_score": tuner.oracle.get_best_trials()[0].score,
        "evaluated": best.evaluate(x[192:], y[192:], verbose=0, return_dict=True)["loss"],
        "failures": {name: str(record.failure) for name, record in tuner._records.all().items() if record.failure},
        "weights": sorted(path.parent.name for path in Path(folder, "project").glob("*/checkpoint.weights.h5")),
    }


def _digits(folder: str, doom: dict[str, Any]) -> Any:
    """Return a hypermodel whose trials die as told: {"who": "worker", "units": 5, "times": 1}.

    With {"who": "node"} a trial says which process of which agent of Ray's it is in, and waits for the end of its node.
    """
    import keras
    import keras_tuner

    class Digits(keras_tuner.HyperModel):  # type: ignore[misc]
        def build(self, hp: Any) -> Any:
            units = hp.Choice("units", UNITS)
            model = keras.Sequential([keras.Input([64]), keras.layers.Dense(units), keras.layers.Dense(10)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return model

        def fit(self, hp: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs["callbacks"] = [*kwargs.get("callbacks", ()), _Diary(folder, hp, doom)]
            return super().fit(hp, model, *args, **kwargs)

    class _Diary(keras.callbacks.Callback):  # type: ignore[misc]
        """Write down what this process trains, and die after the first epoch where that is wanted."""

        def __init__(self, folder: str, hp: Any, doom: dict[str, Any]) -> None:
            super().__init__()
            self.folder, self.units, self.doom = folder, hp.get("units"), doom

        def __deepcopy__(self, memo: Any) -> Any:
            return self

        def on_train_begin(self, logs: Any = None) -> None:
            self._write("begin")

        def on_train_end(self, logs: Any = None) -> None:
            self._write("end")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            replicas = self.model.distribute_strategy.num_replicas_in_sync
            is_here = self.doom.get("units") in (None, self.units) and self.doom.get("replicas") in (None, replicas)
            if self.doom and is_here and self._may_die():
                if self.doom["who"] == "node":
                    sys.stdout.write(f"accident of {os.getpid()} of {os.getppid()}\n")
                    time.sleep(120)
                os.kill(self._victim(), signal.SIGKILL)

        def _may_die(self) -> bool:
            for number in range(self.doom.get("times", 1)):
                with contextlib.suppress(FileExistsError):
                    Path(self.folder, f"death-{number}").touch(exist_ok=False)
                    return True
            return False

        def _victim(self) -> int:
            return os.getpid() if self.doom["who"] == "worker" else int(Path(self.folder, "chief.pid").read_text())

        def _write(self, what: str) -> None:
            environ, replicas = os.environ, self.model.distribute_strategy.num_replicas_in_sync
            task = json.loads(environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
            line = {
                "what": what,
                "tuner": environ.get("KERASTUNER_TUNER_ID"),
                "worker_index": task,
                "units": self.units,
                "replicas": replicas,
                "threads": environ.get("TF_NUM_INTRAOP_THREADS"),
                "listening": _listening(environ.get("KERASTUNER_ORACLE_PORT")) if what == "begin" else None,
                "time": time.time(),
            }
            with open(Path(self.folder, "log.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    return Digits()


def _listening(port: str | None) -> list[str]:
    """Return the addresses that something listens on at a port."""
    import psutil

    listening = [c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return sorted(c.laddr.ip.removeprefix("::ffff:") for c in listening if port and c.laddr.port == int(port))


def log(folder: Any) -> list[dict[str, Any]]:
    """Return what the processes of a search have written down."""
    return [json.loads(line) for line in Path(folder, "log.jsonl").read_text(encoding="utf-8").splitlines()]
