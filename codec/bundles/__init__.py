"""Bundles: small arrays of one codec, dtype and role, joined end to end and coded together.

Streams and tables are shared, so that an array costs neither a table of its own nor a call of each kernel. Steps,
codebooks, factors and bounds stay each array's own. `grouping` says which arrays are coded together, `joined` joins
references and takes them apart, `exact`, `moments` and `levels` code a bundle, and `streams` lists the formats.
"""
