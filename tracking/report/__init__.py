"""A run judged by its numbers: `python -m tracking.report RUN`.

Read command.py, measures.py (the twelve measures), context.py (their limits and verdicts), service_levels.py (many
runs); page.py writes the report. What they measure is tracking/run_facts.py.
"""
