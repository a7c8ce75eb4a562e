"""What a stage holds and communicates: cuts, gathers, offload, roles of ranks."""
