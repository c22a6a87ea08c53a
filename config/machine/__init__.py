"""What the config decides about the machine itself. Standard library only: these files are sent to other machines too.

Read cores.py (which cores there are, by NUMA node), binding.py (each rank on cores of its own), then op_builds.py
(builds of DeepSpeed's ops that a killed process left behind).
"""
