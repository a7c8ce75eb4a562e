"""`plan run`: launch, training, checkpoints and rollback."""
