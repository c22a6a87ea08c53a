"""How a run starts: launcher configs, and a supervisor that starts a job again."""
