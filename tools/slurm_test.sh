#!/usr/bin/env bash
# slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [arguments of test.py]
# GPUS (8), GPUS_PER_NODE (8), CPUS_PER_TASK (5) and SRUN_ARGS from the environment.
set -euo pipefail
[ $# -ge 4 ] || { echo "usage: $0 PARTITION JOB_NAME CONFIG CHECKPOINT [arguments of test.py]" >&2; exit 2; }
PARTITION=$1 JOB_NAME=$2 CONFIG=$3 CHECKPOINT=$4
GPUS=${GPUS:-8} GPUS_PER_NODE=${GPUS_PER_NODE:-8}
# shellcheck disable=SC2086 # SRUN_ARGS is a list of words
exec srun -p "$PARTITION" --job-name="$JOB_NAME" --gres="gpu:$GPUS_PER_NODE" --ntasks="$GPUS" \
    --ntasks-per-node="$GPUS_PER_NODE" --cpus-per-task="${CPUS_PER_TASK:-5}" --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    python -u "$(dirname "$0")/test.py" "$CONFIG" "$CHECKPOINT" --launcher=slurm "${@:5}"
