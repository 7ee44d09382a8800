"""Published systems that ours are compared with; the wheel does not contain them."""
