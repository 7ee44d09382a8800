"""Bundles: small arrays of one codec, dtype and role, joined end to end and coded together.

Streams and tables are shared, so that an array needs no table and no kernel call of its own. Each array keeps its
own steps, codebooks, factors and bounds. `grouping` says which arrays are coded together, `joined` joins
references and takes them apart, `exact`, `moments` and `levels` code a bundle, and `streams` lists the formats.
"""
