"""``accelerate``: finds the products of a program, decides whose they are, and fuses what follows them."""
