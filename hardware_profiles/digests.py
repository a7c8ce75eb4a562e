"""Fields that a profile's digest leaves out."""

OPTIONAL_IN_DIGEST = {"left out of digests at its default": True}
"""Metadata of a field that is newer than plans that store digests: at its default, the digest leaves it out."""
