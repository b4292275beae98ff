#!/usr/bin/env bash
# A better drafter from ten minutes of a GPU: the target answers prompts, a drafter trains on that.
#
#   scripts/gpu_drafter.sh PROMPTS EXCLUDE OUT [MINUTES] [FIT_OPTION ...]
#
# PROMPTS holds math.jsonl, code.jsonl and chat.jsonl, EXCLUDE the prompts of evaluations, which must
# not be among them. Each half takes MINUTES (4). A training that was cut off goes on with the same
# line; `dspark train export` needs no GPU and comes afterwards. DEVICE=cpu rehearses it.
set -euo pipefail
usage="usage: $0 PROMPTS EXCLUDE OUT [MINUTES] [FIT_OPTION ...]"
prompts=${1:?$usage} exclude=${2:?$usage} out=${3:?$usage}
minutes=${4:-4} device=${DEVICE:-cuda}
fit_options=("${@:5}")
mkdir -p "$out"

if [ ! -e "$out/answered" ]; then
    sources=()
    for domain in math code chat; do  # as many tokens as time allows
        sources+=(--source "$domain" "$prompts/$domain.jsonl" 1000000000)
    done
    # Answers that are finished when the time is up are kept; timeout says 124.
    timeout --signal=INT "${minutes}m" dspark train regenerate --device "$device" --out "$out/cache" \
        --batch-size "${BATCH_SIZE:-512}" --threads 4 --exclude "$exclude" "${sources[@]}" || [ $? -eq 124 ]
    touch "$out/answered"
fi
dspark train fit --device "$device" --data "$out/cache" --out "$out/run" --minutes "$minutes" --threads 4 \
    --positions-per-step "${POSITIONS:-16384}" --checkpoint-every 100 "${fit_options[@]}"
echo "next: dspark train export --run $out/run --out $out/drafter"
