"""Engines based on PyTorch's own parallelism: torchtitan, Accelerate, DeepSpeed, and a plain script."""
