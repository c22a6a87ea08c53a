"""A run's first steps recomputed from its config alone, sharing nothing with the engine that made them."""
