"""The largest learning rate that each precision bears: `python -m training.envelope`.

Read command.py, worker.py (a job that trains many small models), report.py, then plot.py.
"""
