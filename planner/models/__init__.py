"""The zoo: models as plain PyTorch, one family per file, and the user's own by name."""

__all__: list[str] = []
