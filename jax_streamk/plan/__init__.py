"""What runs for a product, as data: its problem, kernel, schedule and launch policy, and who chooses them."""
