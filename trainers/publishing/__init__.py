"""Publishing of models that train to models that serve: exact patches over any file system."""
