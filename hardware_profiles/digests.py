"""What of a profile its digest leaves out."""

OPTIONAL_IN_DIGEST = {"left out of digests at its default": True}
"""Metadata of a field that is younger than plans that hold digests."""
