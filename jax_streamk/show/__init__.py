"""What a plan looks like: its figures, and a picture of its work."""
