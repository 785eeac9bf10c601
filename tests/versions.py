"""Versions that tests depend on."""

import keras

__all__ = ["KERAS_VERSION"]

KERAS_VERSION = tuple(int(part) for part in keras.__version__.split(".")[:2])
"""Major and minor version."""
