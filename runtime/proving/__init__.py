"""Proves a large plan by a small one: the same decisions, executed by processes on this machine and compared with the
unsharded model."""
