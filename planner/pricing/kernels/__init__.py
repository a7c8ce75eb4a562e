"""Kernels of operators: their seconds on local shapes, and their launches."""
