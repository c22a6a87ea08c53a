"""Facts of this machine: processes and mounts, how ranks end, their shares of its cores, builds of DeepSpeed's ops.

Standard library only: the doctor sends processes.py and op_builds.py to other machines.
"""
