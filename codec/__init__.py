"""The codec: arrays to bytes and back, behind `compress` and `decompress`.

    compress                 inputs -> plan -> encode -> container
    inputs, plan, compress   the arguments taken apart; what becomes of each array; each array as bytes
    checkpoint, config       a checkpoint and `decompress`; the configuration: rules, targets, chains
    presets                  the five levels, and the published systems
    deduplication            arrays that are copies of others
    rebase, partial          a checkpoint over another parent; some arrays of a checkpoint
    registry                 codecs and stream formats by name, also of other packages
    groups                   arrays that are coded together, and the interface of a stream format
    embeddings               rows of embedding tables (Check-N-Run)
    weights                  partition, codebooks, levels and their deltas, rates, targets; exponents (LC-Checkpoint)
    moments                  first and second moments, log buckets, clusters (BitSnap)
    lossless                 exact coding: byte planes, differences, sparse changes
    entropy                  symbols to bytes, also on a GPU
    format                   the container and its fields
    evidence                 the role of each array, and its source
    state                    trees and their leaves
    base, parallel, ...      what a codec is; work on several cores or one GPU; errors

Imports point from a folder to itself and to folders below it (tests/face/test_layers.py).
"""
