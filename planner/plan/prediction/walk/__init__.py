"""The walk over a bound plan: what every operator and parameter adds to the sums of its pipeline rank, and what of it
overlaps."""
