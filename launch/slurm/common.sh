# shellcheck shell=bash
# Shared by train.sbatch and sweep.sbatch. Sourced from the repository's folder, where sbatch was called.

# Exit code 2 is Mantissa's code for wrong arguments or configs.
refuse() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

prepare() {
    [[ -x .venv/bin/python ]] && PATH=$PWD/.venv/bin:$PATH
    export PATH PYTHONUNBUFFERED=1
    # Left over from the shell that called sbatch, which may itself be inside a job or a launcher.
    unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE MASTER_ADDR MASTER_PORT
    unset SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE
    unset SLURM_MEM_BIND SLURM_MEM_BIND_LIST SLURM_MEM_BIND_TYPE SLURM_MEM_BIND_VERBOSE SLURM_MEM_BIND_PREFER
    # The last element of an array has the array's own number, which scontrol would take to mean all elements.
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID}
    restarts=${SLURM_RESTART_COUNT:-0}
    most_restarts=${MANTISSA_MAX_RESTARTS:-20}
    echo "slurm: job $job, start $((restarts + 1)), $SLURM_JOB_NUM_NODES node(s): $SLURM_JOB_NODELIST"
}

# Run a command, forward SIGUSR1 to it until it has ended, and set `code` to its exit code. The signal is repeated,
# since it would be lost before train.py has installed its handler, but rarely, since Python no longer has a handler
# while it shuts down.
run_to_its_end() {
    asked=
    trap 'asked=yes' USR1 TERM
    "$@" &
    local process=$! repeater=
    while kill -0 "$process" 2>/dev/null; do
        wait "$process"
        if [[ $asked && ! $repeater ]]; then
            echo "slurm: asked to stop at $(date +%T); the run saves and ends" >&2
            while kill -USR1 "$process" 2>/dev/null; do sleep 60; done &
            repeater=$!
        fi
    done
    wait "$process"
    # shellcheck disable=SC2034 # the batch scripts read it
    code=$?
    [[ $repeater ]] && kill "$repeater" 2>/dev/null
    trap '' USR1 TERM
}

# Requeue this job under its own number, and end. Only if it is still running: a job that was cancelled, or that Slurm
# itself is about to requeue, is left alone. $1: why.
requeue() {
    local state
    state=$(scontrol show job -o "$job" | grep -o ' JobState=[A-Z_]*')
    if [[ $state != ' JobState=RUNNING' ]]; then
        echo "slurm: $1; not requeued from here, the job is ${state#*=}" >&2
    elif ((restarts >= most_restarts)); then
        echo "slurm: $1; not requeued, there were $restarts restarts (MANTISSA_MAX_RESTARTS=$most_restarts)" >&2
    else
        echo "slurm: $1; requeued" >&2
        scontrol requeue "$job" || return
        sleep 60 # Slurm ends this script
    fi
}
