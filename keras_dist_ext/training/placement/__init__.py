"""Parts of a model on devices of their own."""

__all__: list[str] = []
