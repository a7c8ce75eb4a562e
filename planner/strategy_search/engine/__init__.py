"""Configurations evaluated in turn, and the best of them settled."""
