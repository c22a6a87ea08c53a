"""Judge a run by its numbers: `python -m tracking.report RUN`.

Read command.py, measures.py (the twelve measures), context.py (their limits and verdicts), service_levels.py (many
runs); page.py writes the report. All of them read a run as tracking/run_facts.py.
"""
