"""Softmax: configuration, kernel and compile function."""
