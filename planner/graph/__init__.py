"""Operator graphs: plain data, traced from PyTorch modules, with their repeated blocks."""

__all__: list[str] = []
