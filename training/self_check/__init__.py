"""Compares steps of a run with plain torch while it trains: the passes of its modules, its gradients, its updates.

Read check.py first (when, what is recorded), then passes.py (what is observed of a step), plain.py (a module of the run
as transformers wrote it) and updates.py (the optimizer's rule).
"""

from training.self_check.check import SelfCheck

__all__ = ["SelfCheck"]
