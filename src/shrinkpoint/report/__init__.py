"""One page about a run: what is collected of a store, the charts, the page."""
