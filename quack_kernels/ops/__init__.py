"""What users call: argument checks, torch op registration, output allocation."""
