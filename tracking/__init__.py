"""Events of a run, recorded once and sent to sinks: `events.jsonl`, the console, wandb, Prometheus.

Read record.py, events.py, jsonl.py, run_dir.py; environment.py; run_facts.py and summary.py (reading a run back); then
console.py, plots.py and the packages wandb/, prometheus/, compare/, watch/, report/.
"""
