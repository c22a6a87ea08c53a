"""The DeepSpeed JSON of a run: what may stand in it, and what becomes of it.

Read document.py (the file as the user wrote it), keys.py (every key that is known), resolve.py (no "auto" left), then
combinations.py (what DeepSpeed computes wrongly, and is refused).
"""
