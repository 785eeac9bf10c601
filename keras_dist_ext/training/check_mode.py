"""Keep what `compile(check=...)` was given: in a saved model beside the optimizer, where Keras does not look."""

from __future__ import annotations

import json
import os
import zipfile
from typing import IO, Literal

from keras_dist_ext.aliases import Config

__all__ = ["CheckMode", "check_mode", "note_mode", "read_mode", "read_mode_from_file"]

CheckMode = bool | Literal["raise"]

_NOTE = "keras_dist_ext.check"


def check_mode(value: object) -> CheckMode:
    """Return what was given as ``check``.

    Raises:
        ValueError: it is none of True, False and "raise".
    """
    if isinstance(value, bool) or (isinstance(value, str) and value == "raise"):
        return value  # type: ignore[return-value]
    raise ValueError(f"Invalid check={value!r}; must be True, False or 'raise'.")


def note_mode(config: Config, mode: CheckMode) -> Config:
    """Return a compile config with a note of the mode, if it is not the default."""
    optimizer = config.get("optimizer")
    if mode is True or not isinstance(optimizer, dict):
        return config
    return {**config, "optimizer": {**optimizer, _NOTE: mode}}


def read_mode(config: Config | None) -> CheckMode:
    """Return what ``note_mode`` has noted in a compile config."""
    optimizer = (config or {}).get("optimizer")
    return check_mode(optimizer.get(_NOTE, True)) if isinstance(optimizer, dict) else True


def read_mode_from_file(file: str | os.PathLike[str] | IO[bytes]) -> CheckMode:
    """Return what a `.keras` file says of its model; legacy files say nothing."""
    if not zipfile.is_zipfile(file):
        return True
    with zipfile.ZipFile(file) as archive:
        return read_mode(json.loads(archive.read("config.json")).get("compile_config"))
