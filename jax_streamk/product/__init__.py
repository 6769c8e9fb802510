"""Products as JAX sees them: what is multiplied, and the primitive with its rules."""
