"""Compare runs: `python -m tracking.compare RUN RUN [RUN ...]`.

Read command.py, result.py (a whole comparison), then its parts: sources.py, differences.py, caveats.py, divergence.py,
cause.py, measures.py, groups.py (repeats), winners.py; text.py and html.py (with curves.py, page.js) render it.
surviving.py is for tools that need the events themselves.
"""
