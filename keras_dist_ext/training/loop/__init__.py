"""Custom training loops."""

__all__: list[str] = []
