"""Say why training is not faster, and whether it trains the same."""

__all__: list[str] = []
