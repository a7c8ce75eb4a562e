"""Engines that run PyTorch's own parallelism: torchtitan, Accelerate, DeepSpeed, and a plain script."""
