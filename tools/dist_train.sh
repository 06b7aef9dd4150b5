#!/usr/bin/env bash
# dist_train.sh CONFIG GPUS [arguments of train.py]
# Over machines: NNODES, NODE_RANK, MASTER_ADDR and PORT as torchrun has them.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 CONFIG GPUS [arguments of train.py]" >&2; exit 2; }
CONFIG=$1 GPUS=$2
exec torchrun --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" --master_port="${PORT:-29500}" \
    --nproc_per_node="$GPUS" \
    "$(dirname "$0")/train.py" "$CONFIG" --launcher pytorch "${@:3}"
