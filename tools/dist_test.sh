#!/usr/bin/env bash
# dist_test.sh CONFIG CHECKPOINT GPUS [arguments of test.py]
# Over machines: NNODES, NODE_RANK, MASTER_ADDR and PORT as torchrun has them.
set -euo pipefail
[ $# -ge 3 ] || { echo "usage: $0 CONFIG CHECKPOINT GPUS [arguments of test.py]" >&2; exit 2; }
CONFIG=$1 CHECKPOINT=$2 GPUS=$3
exec torchrun --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    --nproc_per_node="$GPUS" \
    "$(dirname "$0")/test.py" "$CONFIG" "$CHECKPOINT" --launcher pytorch "${@:4}"
