"""Keys, the store and `jit_cache`."""
