"""A large plan proved by a small one: the same decisions, executed on processes of this machine and compared with the
unsharded model."""
