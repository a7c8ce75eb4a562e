"""Reads a table of measured runs: files, rows, cells, limits, and words in free text."""
