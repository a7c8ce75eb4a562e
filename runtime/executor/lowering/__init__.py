"""The fast path: the plan's operators as straight-line Python, one program per distinct block (see `programs`)."""
