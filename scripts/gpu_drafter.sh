#!/usr/bin/env bash
# A better drafter from a few minutes of a GPU: the target answers prompts, a drafter trains on that.
#
#   scripts/gpu_drafter.sh PROMPTS OUT [GENERATE_MINUTES] [TRAIN_MINUTES] [FIT_OPTION ...]
#
# PROMPTS holds math.jsonl, code.jsonl and chat.jsonl (docs/training.md says how to make them). Each
# part can be cut off at any moment; the same line goes on from there. DEVICE=cpu rehearses it.
set -euo pipefail
prompts=${1:?"usage: $0 PROMPTS OUT [GENERATE_MINUTES] [TRAIN_MINUTES] [FIT_OPTION ...]"}
out=${2:?"usage: $0 PROMPTS OUT [GENERATE_MINUTES] [TRAIN_MINUTES] [FIT_OPTION ...]"}
generate=${3:-4} train=${4:-5} device=${DEVICE:-cuda}
fit_options=("${@:5}")
mkdir -p "$out"

sources=()
for domain in math code chat; do
    sources+=(--source "$domain" "$prompts/$domain.jsonl" 1000000000)  # as many tokens as time allows
done
# Answers that are finished when the time is up are kept; timeout says 124.
timeout --signal=INT "${generate}m" dspark train regenerate --device "$device" --out "$out/cache" \
    --batch-size "${BATCH_SIZE:-512}" --threads 4 "${sources[@]}" || [ $? -eq 124 ]

dspark train fit --device "$device" --data "$out/cache" --out "$out/run" --minutes "$train" --threads 4 \
    --positions-per-step "${POSITIONS:-16384}" --checkpoint-every 100 "${fit_options[@]}"
dspark train export --run "$out/run" --out "$out/drafter"
