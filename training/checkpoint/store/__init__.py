"""Object stores: remote.py (what the run does), store.py and files.py (how), errors.py (what stores say)."""
