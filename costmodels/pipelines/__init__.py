"""Pipelines: the order of the passes on every rank, and how long a step takes in it."""
