"""Activations, saved tensors, weights and optimizer states in the memory of the host or on a disk."""
