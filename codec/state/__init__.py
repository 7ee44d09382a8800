"""A state taken apart: the tree, its leaves, what each of them is, and arrays put together again."""
