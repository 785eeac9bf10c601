"""Deal examples to replicas, group them, and look at pipelines."""

__all__: list[str] = []
