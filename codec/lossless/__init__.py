"""Arrays to the bit: alone, against their parent, as a copy of another array."""
