"""Searches in several processes: a chief, and workers that train its trials."""

__all__: list[str] = []
