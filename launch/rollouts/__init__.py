"""The server that a run of task grpo samples from: `python -m launch.rollouts --config FILE --python PYTHON`."""
