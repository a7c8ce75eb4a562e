"""The treatment of gradients: reduction, norms and the sharded optimizer."""
