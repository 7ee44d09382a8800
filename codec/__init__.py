"""The codec: arrays to bytes and back, behind `compress` and `decompress`."""
