"""Which test runs next, and what happens to one that has to step aside."""
