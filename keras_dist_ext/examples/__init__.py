"""Training scripts to read, to run and to copy from.

`digits` is what `keras-dist-ext demo` runs: a small CNN that learns handwritten digits under several replicas.
"""

__all__: list[str] = []
