"""Jobs under Slurm: batch scripts, and the decision whether to requeue a job that ended."""
