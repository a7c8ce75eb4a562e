"""Megatron-LM and engines based on it: NeMo, Megatron Bridge, MindSpeed."""
