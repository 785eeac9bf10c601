"""Training on parameter servers."""

__all__: list[str] = []
