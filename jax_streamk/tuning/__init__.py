"""Measures plans and keeps the fastest, for ``tuning()``, ``use_tuned_plans()`` and ``python -m jax_streamk tune``."""
