"""The largest stable learning rate of each precision: `python -m lab.envelope`.

Read command.py, search.py, trials.py (a job that trains many small models), then page.py.
"""
