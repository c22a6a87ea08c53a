#!/bin/bash
# One task of train.sbatch: one rank, or the torchrun of a node with MANTISSA_PROCESSES ranks.

# SIGUSR1 to the step reaches all of its processes. train.py has a handler and saves; torchrun, and processes without a
# handler yet, must not die from it. An ignored signal stays ignored in programs started here.
trap '' USR1
# torchrun forwards Slurm's SIGTERM, and would then kill ranks that take more than 30 s to save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600

if ((SLURM_PROCID > 0)); then
    exec >>"$MANTISSA_LOGS/task-$SLURM_PROCID.log" 2>&1
fi

if ((MANTISSA_PROCESSES > 1)); then
    exec python -m torch.distributed.run --nnodes "$SLURM_STEP_NUM_NODES" --node-rank "$SLURM_NODEID" \
        --nproc-per-node "$MANTISSA_PROCESSES" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
        --log-dir "$MANTISSA_LOGS/node-$SLURM_NODEID" --tee 3 --local-ranks-filter 0 train.py "$@"
fi

# Number of tasks on this node; Slurm writes "2(x3),1" for 2, 2, 2 and 1.
node=0
for part in ${SLURM_STEP_TASKS_PER_NODE//,/ }; do
    count=${part%%(*}
    times=1
    [[ $part == *x* ]] && times=${part##*x} && times=${times%)}
    ((node += times))
    ((node > SLURM_NODEID)) && break
done
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=$count LOCAL_SIZE=$count
# With --gpus-per-task each task sees only its own GPU, as the first one.
if [[ ${CUDA_VISIBLE_DEVICES:-} && $CUDA_VISIBLE_DEVICES != *,* ]]; then
    LOCAL_RANK=0
fi
exec python train.py "$@"
