"""What the user is told."""
