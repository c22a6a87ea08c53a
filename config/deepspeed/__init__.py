"""The DeepSpeed JSON of a run: allowed keys, and how it is merged with the run config.

Read document.py (the file as written), keys.py (the known keys), resolve.py (no "auto" left), then combinations.py
(what DeepSpeed computes wrongly, and is refused).
"""
