"""All runs of a folder on one live local page: `python -m tracking.serve [runs/]`.

Read command.py, library.py (which runs there are), skim.py (a run's line in the overview), live.py (a whole run),
notes.py (what readers noted), then
overview.py and run_page.py (what the templates show), and server.py.
"""
