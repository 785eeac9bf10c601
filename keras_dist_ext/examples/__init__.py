"""Training scripts to read, to run and to copy from.

`digits` is what `keras-dist-ext demo` runs, with `demo_options`: a small CNN that learns handwritten digits under
several replicas.

Loops of one's own, each by ``TrainLoop``: `linear_no_keras` is a linear model of `tf.Variable`s with an optimizer
written by hand, `gan` has two optimizers, and `sequences` is an LSTM whose batches are made by length.
"""

__all__: list[str] = []
