"""The reference suite: every kernel against float64, on any machine. Run it with `pytest --pyargs quack_kernels`."""
