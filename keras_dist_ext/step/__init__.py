"""What one replica computes in a step, and what all replicas agree on."""

__all__: list[str] = []
