"""Tables of embeddings that are not on the devices, as ranks see them."""
