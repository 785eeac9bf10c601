"""End a process soon after its program has failed: TensorFlow may take half a minute to leave a cluster.

It does so while Python is taken down, where no Python runs any more. So a thread keeps putting off a time limit of
`faulthandler`, which needs no Python, for as long as there is any: until all exit functions have run, and all output is
written.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import threading
import time
from typing import TextIO

__all__ = ["exit_promptly"]

_LIMIT_SECONDS = 2.0
_PAUSE_SECONDS = 0.2


def exit_promptly() -> None:
    """Have this process, whose program an exception ends, take a few seconds to leave Python; its exit code is 1."""
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - for the stacks that are written at the limit, while Python ends
    begins = threading.Event()
    threading.Thread(target=_put_off, args=(begins, nowhere), daemon=True, name="keras_dist_ext.prompt_exit").start()
    atexit.register(_begin, begins, nowhere)


def _begin(begins: threading.Event, nowhere: TextIO) -> None:
    _set_limit(nowhere)  # here: the thread may not run any more
    begins.set()


def _put_off(begins: threading.Event, nowhere: TextIO) -> None:
    begins.wait()
    while True:
        _set_limit(nowhere)
        time.sleep(_PAUSE_SECONDS)


def _set_limit(nowhere: TextIO) -> None:
    faulthandler.dump_traceback_later(_LIMIT_SECONDS, exit=True, file=nowhere)
