"""Every combination of ZeRO stage and precision against plain torch: `python -m training.matrix`.

Read command.py, cells.py (which combinations), run.py (one of them), then page.py.
"""
