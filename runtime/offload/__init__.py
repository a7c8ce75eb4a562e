"""Activations, saved tensors, weights and optimizer states in host memory or on a disk."""
