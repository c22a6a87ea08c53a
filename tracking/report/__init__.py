"""A run judged by its numbers: `python -m tracking.report RUN`.

Read command.py, measures.py (the twelve measures: absolute.py and relative.py), context.py and sessions.py (what they
are computed from), service_levels.py (many runs); text.py, page.py and html.py show them.
"""
