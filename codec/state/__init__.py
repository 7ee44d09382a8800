"""Conversion of a state to a tree with leaves, and back."""
