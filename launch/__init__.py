"""Start runs: launcher configs, planning, checks of machines, sweeps, and a supervisor that restarts jobs."""
