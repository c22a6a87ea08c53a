"""Heat maps of a run, layers over steps: which module is in trouble, since when, and why.

Read panels.py (what is drawn), grid.py (events into arrays), modules.py (names, order and folding), words.py (the line
under each panel), then picture.py (PNG), blocks.py (terminal) and page.py (HTML).
"""
