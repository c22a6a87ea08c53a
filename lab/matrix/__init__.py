"""Every combination of ZeRO stage and precision compared with plain torch: `python -m lab.matrix`.

Read command.py, cells.py (which combinations), run.py (one of them), then page.py.
"""
