"""A run on several workers that meets accidents, for tests/workers/test_restarts.py.

keras-dist-ext launch --workers 2 --max-restarts 2 tests/support/restart_runs.py FOLDER --accidents fail kill
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import signal
import time
from typing import Any

EPOCHS = 10
BATCHES = 8  # of an epoch


def main() -> None:
    """Train, and leave how often each example was used in each epoch in FOLDER/ended.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--accidents", nargs="*", default=[])
    parser.add_argument("--slowly", action="store_true")
    options = parser.parse_args()
    import keras
    import numpy as np
    from worker_runs import counting_model, ids

    import keras_dist_ext as kde

    strategy = kde.pick_strategy().strategy
    index = strategy.cluster_resolver.task_id
    attempt = int(os.environ["KERAS_DIST_EXT_RESTART"])

    numbers = itertools.count(1)  # of this attempt; what a callback counts, a resumed run takes over

    class Note(keras.callbacks.Callback):
        """Says when epochs begin, and has worker 1 meet its accident in the middle of one."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            (options.folder / f"epoch {epoch}").touch()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            number = next(numbers)
            if options.slowly:
                time.sleep(0.1)
            if index == 1 and number >= 7 and batch < BATCHES - 1 and attempt < len(options.accidents):
                globals()[options.accidents[attempt]]()

    resume = kde.Resume(options.folder / "saves", 2, on_preemption=True)
    model = counting_model(strategy)
    history = model.fit(ids(), ids(), batch_size=4, epochs=EPOCHS, verbose=0, callbacks=[resume, Note()])
    if index == 0:
        seen = [np.asarray(counts).tolist() for counts in history.history["seen"]]
        (options.folder / "ended.json").write_text(json.dumps(seen))


def fail() -> None:
    raise ValueError("an accident")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang() -> None:
    time.sleep(1000)


def read_ended(folder: pathlib.Path) -> list[list[float]]:
    """Return how often each example was used, of all epochs."""
    return json.loads((folder / "ended.json").read_text())  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
