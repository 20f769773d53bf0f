"""sandbox_gym in RLlib: ready configurations."""
