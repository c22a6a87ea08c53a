"""A table of which planted defects the checks find: `make detection` writes docs/detection.md.

Read plants/ (how a defect gets into a run), defects.py and later.py (which ones), cells.py (which runs), run.py (one of
them, in processes that stay up), judge.py (what is said of it), then command.py and page.py. gate.py puts nine of them
through the whole parity gate, in jobs that planted.py starts: `make parity-defects`.
"""
