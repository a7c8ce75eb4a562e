"""The program of a stage: instructions, prefetched and coalesced all-gathers, lowering to straight-line Python."""
