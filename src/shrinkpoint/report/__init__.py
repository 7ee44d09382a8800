"""The HTML report about a run: collection of its data, charts, and page."""
