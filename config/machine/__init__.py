"""CPU cores and builds of DeepSpeed's ops. Standard library only: op_builds.py is sent to other machines.

Read cores.py (the cores by NUMA node), binding.py (each rank on cores of its own), then op_builds.py (build locks).
"""
