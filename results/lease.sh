#!/usr/bin/env bash
# Use a GPU that is rented for minutes, on a machine without network: first checks (results/gpu.md), then a row of the
# paper's tables in the remaining time. The next lease continues that row.
#
#   bash results/lease.sh pack RAW [BACK]        on your machine: fill .lease, which is copied with the working tree.
#                                                RAW: the row's raw data; BACK: the output folder of the previous lease
#   COMMIT=1a2b3c bash results/lease.sh 9        on the GPU machine: checks, then the row, 9 minutes in total. Copy back
#                                                $OUT (or lease-out): gpu.md, log.txt, and runs.tgz in parts of 16 MiB
#   COMMIT=1a2b3c bash results/lease.sh 3 row    on the GPU machine, in another call: continue the row for 3 minutes
#
# A row has three runs: pretraining, then finetuning and training from scratch at the same time. If the schedule is
# constant and the best checkpoint counts, an interrupted run is an exact beginning of the paper's run.
# The first row of this list is next. Remove it once it is complete:
rows=("image transformer" "text dlr")
# Rehearsal without a GPU: DEVICE=cpu ROW="TASK MODEL" FLAGS="flags of training" CHECKS=steps
set -u
cd "$(dirname -- "$0")/.."
read -r task model <<< "${ROW:-${rows[0]}}"
python=${PYTHON:-python3} device=${DEVICE:-cuda} out=${OUT:-lease-out} runs=runs/lease/$task-$model
most=64 part=16 parts=6                            # limits: MiB copied there; MiB and number of files copied back

if [ "${1:-}" != pack ] && ! [[ ${1:-} =~ ^[0-9.]+$ ]] || [ "${1:-}" = pack ] && [ $# -lt 2 ]; then
    echo "usage: bash results/lease.sh pack RAW [BACK], or MINUTES [row]" >&2
    exit 2
fi
if [ "$1" = pack ]; then
    mkdir -p .lease && rm -f .lease/* && "$python" data.py --task "$task" --raw "$2" || exit
    if [ $# -ge 3 ]; then cp "$3"/runs.tgz.* .lease || exit; fi
    "$python" - "data/$task" .lease/data.tar.xz <<'EOF' || exit
import json, lzma, sys, tarfile
from tasks import TASKS
sizes = json.load(open(f"{sys.argv[1]}/meta.json"))["sizes"]
if sizes != list(TASKS[sys.argv[1].split("/")[1]].sizes):
    sys.exit(f"error: {sys.argv[1]} holds a part of the data, {sizes}; remove it and give the complete RAW")
# Neighbouring pixels differ little: compressing their differences takes 43 MiB instead of 48.
filters = [{"id": lzma.FILTER_DELTA, "dist": 1}] * ("image" in sys.argv[1]) + [{"id": lzma.FILTER_LZMA2, "preset": 6}]
with lzma.open(sys.argv[2], "wb", filters=filters) as file, tarfile.open(fileobj=file, mode="w") as archive:
    archive.add(sys.argv[1])
EOF
    bytes=$( (git ls-files -z --cached --others --exclude-standard; printf '%s\0' .lease/*) | xargs -0 cat | wc -c)
    echo ".lease is ready; the working tree with it has $((bytes >> 20)) of at most $most MiB"
    [ "$bytes" -lt $((most << 20)) ]
    exit
fi

end=$((SECONDS + $(awk "BEGIN {print int(60 * $1)}") - 15))                                       # the rest: packing
left() { echo $((end - SECONDS)); }

stage() {                       # name, command: run it until the time is over, without --compile if that fails
    for compile in --compile ""; do
        [ "$device" = cuda ] || [ -z "$compile" ] || continue
        [ "$(left)" -ge 5 ] || return 1
        # shellcheck disable=SC2086
        timeout -k 10 "$(left)" "$python" "${@:2}" ${FLAGS:---log-every 500} $compile --device "$device" \
            --out "$runs/$1" --resume >> "$out/$1.txt" 2>&1
        case $? in 0) return 0 ;; 124 | 143) return 1 ;; esac                                      # done; out of time
    done
    return 1
}

mkdir -p "$out" "$runs" && rm -f "$out"/runs.tgz.*
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
[ -e "$runs/pretrain" ] || ! ls .lease/runs.tgz.* > /dev/null 2>&1 || cat .lease/runs.tgz.* | tar xz || exit
[ -e "data/$task" ] || [ ! -e .lease/data.tar.xz ] || "$python" -c '
import tarfile
tarfile.open(".lease/data.tar.xz").extractall()' 2>> "$out/log.txt" &
if [ "${2:-}" != row ]; then                                                                       # 3/5 of the time
    "$python" results/first_hour.py --device "$device" --only "${CHECKS:-parity,kernels,steps,compiled}" \
        --seconds $(($(left) * 3 / 5)) --out "$out/gpu.md" 2>> "$out/log.txt" || echo "checks: exit code $?"
fi
wait                                                                                               # for the data
if stage pretrain pretrain.py --task "$task" --model "$model"; then
    stage spt finetune.py --init "$runs/pretrain" &
    stage scratch finetune.py --task "$task" --model "$model"
    wait
fi

for run in pretrain spt scratch; do
    if [ -e "$runs/$run/result.json" ]; then rm -f "$runs/$run/last.pt"; fi                        # no longer needed
    echo "$run: $(grep -h '"eval"' "$runs/$run/log.jsonl" 2> /dev/null | tail -n 1)"
    if [ -e "$out/$run.txt" ]; then cat "$out/$run.txt" >> "$out/log.txt" && rm "$out/$run.txt"; fi
done
tar cz --exclude=.lock "$runs" | split -b "${part}m" - "$out/runs.tgz."
if [ "$(ls "$out"/runs.tgz.* | wc -l)" -gt $parts ]; then
    echo "more than $parts parts of $part MiB: leaving out the unfinished runs"
    rm "$out"/runs.tgz.*
    tar cz --exclude=last.pt --exclude=.lock $(dirname "$runs"/*/result.json) | split -b "${part}m" - "$out/runs.tgz."
fi
