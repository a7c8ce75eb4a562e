"""Communication: the device mesh and its groups, collectives, messages between ranks, redistribution of layouts."""
