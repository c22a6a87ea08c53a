"""Compare runs: `python -m tracking.compare RUN RUN [RUN ...]`.

Read command.py, result.py (a whole comparison, computed once), then what it is made of: sources.py, differences.py,
divergence.py, cause.py, measures.py; text.py and html.py show it.
"""
