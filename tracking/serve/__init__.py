"""All runs of a folder on one live local page: `python -m tracking.serve [runs/]`.

Read command.py, library.py (finds runs and reads them by tracking/live.py), notes.py (readers' notes), then overview.py
and run_page.py (content of the templates), pages.py and server.py.
"""
