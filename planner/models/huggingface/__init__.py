"""Models of Hugging Face: read from a `config.json`, built, and rewritten so that they can be traced and divided."""
