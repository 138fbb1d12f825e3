"""The compile pool: who compiles what, and in which process."""
