"""Measuring plans, and keeping the fastest: what ``tuning()``, ``use_tuned_plans()`` and ``python -m jax_streamk tune`` are made of."""
