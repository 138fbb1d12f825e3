"""What kernels compiled for the host CPU share; the kernels themselves are in `quack_kernels.kernels`."""
