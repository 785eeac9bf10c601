"""Who takes part in a run, and processes that take part. No TensorFlow at import."""

__all__: list[str] = []
