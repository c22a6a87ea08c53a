"""Check the machines before a job uses them: `python -m launch.doctor [--hostfile FILE] [--config FILE]`.

Read command.py, examine.py (what each machine is asked), hosts.py and agent.py (how), facts.py and programs.py (the
answers), host_checks.py and cluster_checks.py (what is wrong), report.py. agent.py and facts.py are sent to other
machines as source, along with processes.py and op_builds.py of config/machine.
"""
