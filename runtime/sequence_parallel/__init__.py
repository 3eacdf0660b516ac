"""Lets ranks have different parts of each sequence, and different heads inside of attention (Ulysses)."""
