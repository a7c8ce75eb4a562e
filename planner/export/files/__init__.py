"""The languages that settings stand in: shell, TOML, YAML, Python, protocol buffers. Nothing in a file is run."""
