"""Object stores: remote.py (what the run does), store.py (how), errors.py (what stores say)."""
