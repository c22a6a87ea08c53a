"""Jobs under Slurm: batch scripts, and the decision whether a job that ended is put back into the queue."""
