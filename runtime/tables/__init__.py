"""Embedding tables off the devices, as ranks see them."""
