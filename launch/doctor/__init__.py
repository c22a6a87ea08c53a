"""Look at the machines before the job does: `python -m launch.doctor [--hostfile FILE] [--config FILE]`.

Read command.py, examine.py (what is asked of whom), hosts.py and agent.py (how a machine is asked), facts.py,
folders.py and programs.py (what it answers), host_checks.py and cluster_checks.py (what is wrong with that), report.py.
agent.py, facts.py and folders.py are sent to other machines as source: standard library and config/machine/ only.
"""
