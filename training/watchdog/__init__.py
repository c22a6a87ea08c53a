"""Notice that a rank is lost, name it, and end the others, so that no collective waits forever.

Read watch.py, heartbeats.py (what ranks write to the store), links.py (connections between rank 0 and other machines),
then witness.py (a process beside a rank, standard library only); config/machine/members.py describes a process.
"""
