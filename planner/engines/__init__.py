"""What training engines can be told, as data: read by the search, which stays within it, and by the exporters."""
