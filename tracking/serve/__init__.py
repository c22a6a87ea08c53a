"""All runs of a folder on one live local page: `python -m tracking.serve [runs/]`.

Read command.py, library.py (which runs there are, by tracking/live.py), notes.py (what readers noted), then overview.py
and run_page.py (what the templates show), pages.py and server.py.
"""
