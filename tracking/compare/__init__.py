"""Compare runs: `python -m tracking.compare RUN RUN [RUN ...]`.

Read command.py, result.py (a whole comparison), then its parts: sources.py, differences.py, divergence.py, cause.py,
measures.py; text.py and html.py show it.
"""
