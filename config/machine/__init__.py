"""Facts of this machine: its processes, the CPUs of this one, where DeepSpeed's ops are built.

Standard library only: op_builds.py is sent to other machines.
"""
