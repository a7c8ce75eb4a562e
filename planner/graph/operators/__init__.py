"""Operators that the planner adds to those of PyTorch, and what they compute."""
