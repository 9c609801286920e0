#!/usr/bin/env bash
# A GPU rented for minutes, on a machine without network, to which little can be sent and from which little comes back:
# first what must be checked (gpu.md), then a row of the paper for as long as there is time. Another lease goes on with it.
#
#   bash results/lease.sh pack RAW [BACK]        at home: .lease, which travels with the working tree, from the folder RAW
#                                                of the row's raw data and BACK, what came back from the lease before
#   COMMIT=1a2b3c bash results/lease.sh 9        there, for 9 minutes: checks, then the row. All that is to come back is
#                                                in $OUT (or lease-out): gpu.md, log.txt, runs.tgz in parts of 16 MiB
#   COMMIT=1a2b3c bash results/lease.sh 3 row    there, right after it: the row goes on
#
# A row has three runs: pretraining, then finetuning beside training from scratch. Constant schedules and the best
# checkpoint make a run that is cut short a prefix of the paper's. A row that is whole leaves this list:
rows=("image transformer" "text dlr")
# For a rehearsal without a GPU: DEVICE=cpu, ROW="TASK MODEL", FLAGS="--steps 60" (of training), CHECKS=attention
set -u
cd "$(dirname -- "$0")/.."
read -r task model <<< "${ROW:-${rows[0]}}"
python=${PYTHON:-python3} device=${DEVICE:-cuda} out=${OUT:-lease-out} most=64 part=16

if [ "${1:-}" = pack ]; then
    [ $# -ge 2 ] || { echo "usage: bash results/lease.sh pack RAW [BACK]" >&2; exit 2; }
    mkdir -p .lease && rm -f .lease/* && "$python" data.py --task "$task" --raw "$2" || exit
    if [ $# -ge 3 ]; then cp "$3"/runs.tgz.* .lease || exit; fi
    "$python" - "data/$task" .lease/data.tar.xz <<'EOF' || exit
import lzma, sys, tarfile
# Of images the differences of neighbours are smaller than they are: 43 MiB in place of 48.
filters = [{"id": lzma.FILTER_DELTA, "dist": 1}] * ("image" in sys.argv[1]) + [{"id": lzma.FILTER_LZMA2, "preset": 6}]
with lzma.open(sys.argv[2], "wb", filters=filters) as file, tarfile.open(fileobj=file, mode="w") as archive:
    archive.add(sys.argv[1])
EOF
    bytes=$( (git ls-files -z --cached --others --exclude-standard; printf '%s\0' .lease/*) | xargs -0 cat | wc -c)
    echo ".lease is ready; with the working tree it has $((bytes >> 20)) of at most $most MiB"
    [ "$bytes" -lt $((most << 20)) ]
    exit
fi

end=$((SECONDS + $(awk "BEGIN {print int(60 * ${1:?minutes})}") - 15))                        # 15 seconds to pack the runs
left() { echo $((end - SECONDS)); }

stage() {                       # a run's name, its command: as far as it goes, without --compile if that fails
    for compile in --compile ""; do
        [ "$device" = cuda ] || [ -z "$compile" ] || continue
        [ "$(left)" -ge 5 ] || return 1
        # shellcheck disable=SC2086
        timeout -k 10 "$(left)" "$python" "${@:2}" ${FLAGS:---log-every 500} $compile --device "$device" \
            --out "runs/lease/$1" --resume >> "$out/$1.txt" 2>&1
        case $? in 0) return 0 ;; 124 | 143) return 1 ;; esac                                  # done; out of time
    done
    return 1
}

mkdir -p "$out" runs/lease
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
[ -e runs/lease/scratch ] || ! ls .lease/runs.tgz.* > /dev/null 2>&1 || cat .lease/runs.tgz.* | tar xz
[ -e "data/$task" ] || [ ! -e .lease/data.tar.xz ] || "$python" -c '
import tarfile
tarfile.open(".lease/data.tar.xz").extractall()' 2> "$out/log.txt" &
if [ "${2:-}" != row ]; then
    # Three fifths at most; what they leave is the row's.
    "$python" results/first_hour.py --device "$device" --only "${CHECKS:-parity,attention,kernels,steps,compiled,runs}" \
        --seconds $(($(left) * 3 / 5)) --out "$out/gpu.md" 2>> "$out/log.txt" || echo "checks: exit code $?"
fi
wait                                                                                           # for the data
if stage pretrain pretrain.py --task "$task" --model "$model"; then
    stage spt finetune.py --init runs/lease/pretrain &
    stage scratch finetune.py --task "$task" --model "$model"
    wait
fi

# A finished run needs no last.pt.
for run in scratch pretrain spt; do
    if [ -e "runs/lease/$run/result.json" ]; then rm -f "runs/lease/$run/last.pt"; fi
    echo "$run: $(grep -h '"eval"' "runs/lease/$run/log.jsonl" 2> /dev/null | tail -n 1)"
    if [ -e "$out/$run.txt" ]; then cat "$out/$run.txt" >> "$out/log.txt" && rm "$out/$run.txt"; fi
done
tar cz --exclude=.lock runs/lease | split -b "${part}m" - "$out/runs.tgz."
