"""Megatron-LM and what stands on it: NeMo, Megatron Bridge, MindSpeed."""
