"""A training step: pipeline, inputs, checks, guard."""
