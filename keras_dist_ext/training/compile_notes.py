"""Save our own arguments of `compile` with a model: next to the optimizer's config, where Keras does not look."""

from __future__ import annotations

import json
import zipfile

from keras_dist_ext.aliases import Config, JsonValue, SavePath

__all__ = ["noted_in", "read_note", "saved_config"]


def noted_in(config: Config, name: str, value: object) -> Config:
    """Return a compile config with a note."""
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, dict):
        return config
    return {**config, "optimizer": {**optimizer, f"keras_dist_ext.{name}": value}}


def read_note(config: Config | None, name: str, default: object) -> JsonValue:
    """Return what ``noted_in`` has noted in a compile config."""
    optimizer = (config or {}).get("optimizer")
    return optimizer.get(f"keras_dist_ext.{name}", default) if isinstance(optimizer, dict) else default


def saved_config(file: SavePath) -> Config | None:
    """Return the compile config in a `.keras` file, if it has one; legacy files say nothing."""
    if not zipfile.is_zipfile(file):
        return None
    with zipfile.ZipFile(file) as archive:
        config: Config | None = json.loads(archive.read("config.json")).get("compile_config")
    return config
