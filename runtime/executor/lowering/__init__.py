"""The fast path: the plan's operators as straight Python, one program for each distinct block (see `programs`)."""
