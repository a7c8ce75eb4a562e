"""The file formats of settings: shell, TOML, YAML, Python, protocol buffers. Nothing in a file is run."""
