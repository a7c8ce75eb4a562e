"""What holds while a module is traced, and how its exported graph is taken over."""
