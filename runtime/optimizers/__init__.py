"""The mathematics of updates: optimizers and their hyperparameters."""
