"""Compares what a plan makes its ranks do with the prediction."""
