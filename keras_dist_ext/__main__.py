"""Run the command line as `python -m keras_dist_ext`."""

import sys

from keras_dist_ext.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
