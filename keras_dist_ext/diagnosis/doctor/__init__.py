"""Say why training is not faster."""

__all__: list[str] = []
