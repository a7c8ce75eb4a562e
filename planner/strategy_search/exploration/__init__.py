"""One attempt to answer a request: in which order configurations are evaluated, what is found, and what is proved."""
