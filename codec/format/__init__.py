"""File format: fields, the container with its chunks, and files that are read in parts."""
