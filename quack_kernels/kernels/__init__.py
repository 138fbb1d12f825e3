"""The kernels, one directory each. Nothing in here imports torch."""
