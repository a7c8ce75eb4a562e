"""Parameters and buffers as ranks hold them."""
