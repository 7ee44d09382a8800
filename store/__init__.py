"""The store: chains of checkpoints on disk or object storage, committed by one atomic step."""
