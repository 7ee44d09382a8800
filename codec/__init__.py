"""The codec: arrays to bytes and back, behind `compress` and `decompress`.

    compress, checkpoint      the two functions, and a checkpoint as bytes
    config, presets           what is asked for: rules, each a codec
    opened, matching          a state before it is compressed: its arrays, and which codec each of them gets
    copies, restate, partial  arrays that are copies of others; checkpoints stated anew; some arrays of a checkpoint
    streams                   the stream formats by name: what reads them
    embeddings                rows of embedding tables (Check-N-Run)
    weights                   partition, codebooks, levels and their deltas, rates, targets; exponents (LC-Checkpoint)
    moments                   first and second moments, log buckets, clusters (BitSnap)
    lossless                  to the bit: byte planes, differences, changes
    entropy                   symbols to bytes
    format                    the container and its fields
    state                     trees and their leaves
    base, parallel, ...       what a codec is; work on several cores or one GPU; errors

From above to below: a module imports its own folder and lower ones only (tests/face/test_layers.py).
"""
