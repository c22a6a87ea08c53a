"""Facts of this machine: its processes and mounts, and the CPUs of this process.

Standard library only: the doctor sends processes.py to other machines.
"""
