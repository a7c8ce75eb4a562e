"""Programs of a stage: instructions, prefetched and coalesced gathers, lowering to straight Python."""
