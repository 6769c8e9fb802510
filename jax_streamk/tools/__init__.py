"""The commands of ``python -m jax_streamk``, a module each, and what they share."""
