"""Lowers products: to a custom call on one device, to a product that XLA partitions on several."""
