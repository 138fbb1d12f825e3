"""RMSNorm: configuration, kernel and compile function."""
