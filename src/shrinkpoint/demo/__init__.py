"""`shrinkpoint demo`: train a small GPT that is killed and resumes from its checkpoints."""
