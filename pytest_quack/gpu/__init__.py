"""GPUs: which there are, which worker gets which, and what happens when one has no memory left."""
