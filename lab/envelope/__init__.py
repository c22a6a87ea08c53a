"""The largest stable learning rate of each precision: `python -m lab.envelope`.

Read command.py, worker.py (a job that trains many small models), report.py, then plot.py.
"""
