"""Optimizers and their hyperparameters."""
