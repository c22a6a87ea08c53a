"""Events of a run, recorded once and sent to sinks: `events.jsonl`, the console, wandb and other trackers, Prometheus.

Read record.py, events.py, jsonl.py, run_dir.py; run_lock.py, status.py, crash.py (is a run alive, and how it ended);
verdict.py (how it went); environment.py; run_facts.py, summary.py and live.py (a run read back); then console.py,
plots.py and the packages wandb/, trackers/, prometheus/, tracing/, pages/ (HTML), compare/, watch/, report/.
"""
