"""The unsharded model that a plan is compared with."""
