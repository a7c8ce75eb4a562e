"""A pipeline in pieces: prices of memory, division of blocks among stages."""
