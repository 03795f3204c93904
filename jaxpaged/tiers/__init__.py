"""Tiers of blocks below the device: host memory, disk, and stores of others."""
