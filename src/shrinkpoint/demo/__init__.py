"""The main job: a small GPT whose training is killed, and goes on from compressed checkpoints (`shrinkpoint demo`)."""
