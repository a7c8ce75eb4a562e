"""Communication: the device mesh and its groups, collectives, messages between ranks, layouts changed between
devices."""
