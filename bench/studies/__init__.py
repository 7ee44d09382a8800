"""Research on the codec's quality: whole campaigns of trainings; no wheel ships it."""
