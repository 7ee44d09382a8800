"""Reference back end: array API only, clear and slow, the oracle the two fast ones are compared with."""
