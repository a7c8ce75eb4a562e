"""What a plan makes ranks do, compared with what was predicted."""
