"""Drafters, one family a file, and what the verifier shares with them."""
