"""Mixtures of experts: routers, the operator that sends tokens to experts and computes them, and its products in
fp8."""
