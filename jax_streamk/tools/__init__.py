"""What ``python -m jax_streamk`` runs: a module a tool, with ``add_arguments(parser)`` and ``run(arguments)``."""
