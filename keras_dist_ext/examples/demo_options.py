"""The options of the demo's command line, apart from the demo: this imports no TensorFlow."""

import argparse
from typing import Any

from keras_dist_ext.argument_types import count, path, process_count

__all__ = ["add_options", "given_options"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to a parser."""
    parser.add_argument("--replicas", type=count, metavar="N", help="replicas in each process", dest="num_replicas")
    parser.add_argument("--workers", type=process_count, metavar="N", help="processes", dest="num_workers")
    parser.add_argument("--epochs", type=count, metavar="N")
    parser.add_argument("--log-dir", type=path, metavar="DIR", help="for TensorBoard")


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given, as ``digits.main`` takes them."""
    given = {name: getattr(arguments, name) for name in ("num_replicas", "num_workers", "epochs", "log_dir")}
    return {name: value for name, value in given.items() if value is not None}
