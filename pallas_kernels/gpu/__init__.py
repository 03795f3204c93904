"""Kernels for NVIDIA GPUs, in Pallas' Mosaic GPU."""
