"""Seconds of kernels: products, attention, experts, scans, and whatever passes over memory."""
