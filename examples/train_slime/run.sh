#!/usr/bin/env bash
# GRPO on SWE-Gym with Slime: one node of 8 GPUs, 4 train and 4 sample. Start Polar first (README.md).
set -euo pipefail

: "${SLIME_DIR:?folder of a Slime checkout}"
: "${MODEL_DIR:?Hugging Face checkpoint of the policy}"
: "${REF_DIR:?the same, converted for Megatron by Slime's tools}"
: "${DATA:?train.jsonl that prepare_data.py wrote}"
: "${POLAR_API_KEY:?API key with the scopes submit and read}"
: "${MODEL_ARGS_FILE:?Slime's scripts/models/<model>.sh, which sets MODEL_ARGS}"
SAVE_DIR="${SAVE_DIR:-checkpoints}"
HERE="$(cd "$(dirname "$0")" && pwd)"

# The bridge's configuration with the key, readable by this user alone.
CONFIG="$(mktemp)"
chmod 600 "$CONFIG"
trap 'rm -f "$CONFIG"' EXIT
sed "s|examples/train_slime/|$HERE/|" "$HERE/polar.yaml" > "$CONFIG"
printf 'polar_api_key: "%s"\n' "$POLAR_API_KEY" >> "$CONFIG"

# shellcheck source=/dev/null
source "$MODEL_ARGS_FILE"

POLAR_ARGS=(
  --rollout-function-path polar.trainers.slime.generate_rollout_polar_async
  --custom-reward-post-process-path polar.trainers.slime.post_process_rewards
  --custom-config-path "$CONFIG"
)
CHECKPOINT_ARGS=(
  --hf-checkpoint "$MODEL_DIR"
  --ref-load "$REF_DIR"
  --load "$SAVE_DIR"
  --save "$SAVE_DIR"
  --save-interval 10
)
ROLLOUT_ARGS=(
  --prompt-data "$DATA"
  --input-key prompt
  --metadata-key metadata
  --rollout-shuffle
  --num-epoch 1
  --rollout-batch-size 4
  --n-samples-per-prompt 16
  --rollout-temperature 1.0
  --rollout-max-response-len 65536
  --global-batch-size 64
  --balance-data
)
TRAIN_ARGS=(
  --advantage-estimator grpo
  --use-tis
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.98
  --use-dynamic-batch-size
  --max-tokens-per-gpu 16384
)
CLUSTER_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 4
  --rollout-num-gpus 4
  --rollout-num-gpus-per-engine 1
  --update-weights-interval 1
  --sglang-router-ip 127.0.0.1
  --sglang-router-port 30000
  --sglang-mem-fraction-static 0.8
)

cd "$SLIME_DIR"
python3 train_async.py "${MODEL_ARGS[@]}" "${POLAR_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
  "${TRAIN_ARGS[@]}" "${CLUSTER_ARGS[@]}"
