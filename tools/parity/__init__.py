"""Does half precision train the same model? `python -m tools.parity --config FILE`.

Read gate.py, jobs.py (the runs it starts), steps.py, reference.py and signature.py (single steps from the same
masters), energy.py, report.py.
"""

from training.start.process import import_deepspeed

import_deepspeed()  # before a module of the gate does so with MLflow
