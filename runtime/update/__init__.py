"""What becomes of gradients: reduction, norms and the sharded optimizer."""
