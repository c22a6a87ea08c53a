"""Notice that a rank is lost, name it, and end the others, so that no collective waits for ever.

Read watch.py, heartbeats.py (what ranks write to the store), links.py (a connection to every other rank), process.py
(what is known of a process), then witness.py (a process beside each rank that starts from the standard library alone).
"""
