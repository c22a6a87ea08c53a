"""Notice that a rank is lost, name it, and end the others, so that no collective waits for ever.

Read watch.py, heartbeats.py (what ranks write to the store), links.py (a connection to every other rank), then
witness.py (a process beside each rank, from the standard library alone); config/machine/members.py knows of a process.
"""
