"""Products in 8 bits: their kernels, their scales, and weights that are gathered in 8 bits."""
