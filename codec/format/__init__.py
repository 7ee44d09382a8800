"""How bytes lie in a file: little fields, the container and its chunks, files of which only parts are fetched."""
