"""Reference back end: clear, slow code on the array API, the oracle of the fast ones."""
