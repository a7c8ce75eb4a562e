"""The unsharded model with which a plan is compared."""
