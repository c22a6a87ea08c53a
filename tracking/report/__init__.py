"""A run judged by its numbers: `python -m tracking.report RUN`.

Read command.py, measures.py (the twelve measures), context.py and sessions.py (their inputs), service_levels.py (many
runs); page.py and html.py write the pages.
"""
