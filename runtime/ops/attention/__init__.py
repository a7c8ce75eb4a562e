"""Attention beyond what PyTorch computes: to pieces of the keys, in a ring, in slices, with a trained bias."""
