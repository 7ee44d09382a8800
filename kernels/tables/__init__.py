"""Small tables as bits: lengths of Huffman codes, and frequencies of rANS.

docs/entropy.md defines the format.
"""
