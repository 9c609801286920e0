#!/usr/bin/env bash
# Chains the stages. Holds no hyper-parameter: those are the recipes in pretrain.py and finetune.py.
#
#   bash run_all.sh demo             {Transformer, S4} x {scratch, SPT} on two generated tasks, 3 seeds, on a laptop
#   bash run_all.sh demo-text        {rotary Transformer, S4} x {scratch, SPT} on real film reviews; downloads IMDb
#   bash run_all.sh text256          the same with twice the text, all reviews and three times the steps
#   bash run_all.sh demo-init        {S4, DLR} x {own start, random start} x {scratch, SPT} on the reviews of demo-text
#   bash run_all.sh table2           the paper's: table1 table2 table3 table7 table8 table9 figure1 .. figure5 all
#
#   --preset mini         the paper's tables and figures in small: short stand-in tasks on 2 CPU cores
#   --list                prints the commands instead, one chain a line, for any scheduler
#   --seeds 0,1,2         (default)
#   --tasks text,image    only these
#   --models s4,rotary    only these
#   --gpus 0,1,2,3        one chain at a time on each of these GPUs
#   --raw DIR             demo-text, text256, demo-init: the aclImdb_v1.tar.gz that you have in DIR, not a download
#
# Rerunning goes on where it was stopped: finished runs are skipped, started ones resumed. Runs that several tables share
# are made once. A chain that fails does not stop the others; the exit code tells.
# Needs bash, GNU xargs and flock, as Linux has them.
# Environment: JOBS=number of runs side by side (default: CPU cores, or one on each GPU)  RUNS=folder of the runs
set -euo pipefail
HERE=$PWD
cd -- "$(dirname -- "$0")" > /dev/null

usage() {
    echo "usage: bash run_all.sh demo|demo-text|text256|demo-init|table1|table2|table3|table7|table8|table9|figure1|..|figure5|all" \
         "[--preset paper|mini] [--list] [--seeds 0,1,2] [--tasks T,...] [--models M,...] [--gpus G,...] [--raw DIR]" >&2
    exit 2
}
die() { echo "error: $*" >&2; exit 2; }

TARGET=${1:-} PRESET=paper LIST='' RAW='' GPUS='' ONLY_TASKS='' ONLY_MODELS='' SEEDS="0 1 2"
[ -n "$TARGET" ] && shift || usage
while [ $# -gt 0 ]; do
    case "$1" in
        --list) LIST=1; shift; continue ;;
        --preset|--seeds|--tasks|--models|--gpus|--raw) [ -n "${2:-}" ] || usage ;;
        *) usage ;;
    esac
    case "$1" in
        --preset) PRESET=$2 ;;
        --seeds) SEEDS=${2//,/ } ;;
        --tasks) ONLY_TASKS=$2 ;;
        --models) ONLY_MODELS=$2 ;;
        --gpus) GPUS=${2//,/ } ;;
        --raw) RAW=$2 ;;
    esac
    shift 2
done

# ---- which runs --------------------------------------------------------------------------------------------------------
# Each line that these functions print is a chain: one command, or two stages joined by &&, so that every line can run
# anywhere, in any order. A run's name says all that distinguishes it.

wanted() {
    [[ -z $ONLY_TASKS || ,$ONLY_TASKS, == *,$1,* ]] && [[ -z $ONLY_MODELS || ,$ONLY_MODELS, == *,$2,* ]] &&
        [[ " $LACKING " != *" $1 "* && " $LACKING " != *" $2 "* ]]
}

# scratch|pretrain|spt|both TASK MODEL [FLAGS...]: with the seed $SEED
scratch() {
    name "$@" && echo "python finetune.py $what --seed $SEED --resume --out $name-scratch-s$SEED" || true
}
pretrain() {
    name "$@" && echo "python pretrain.py $what --seed $SEED --resume --out $name-pretrain-s$SEED" || true
}
spt() {
    local first
    first=$(pretrain "$@")
    [ -z "$first" ] || { name "$@" && echo "$first &&" \
         "python finetune.py --init $name-pretrain-s$SEED --seed $SEED --resume --out $name-spt-s$SEED"; }
}
both() { scratch "$@"; spt "$@"; }
# Sets $name, of the run, and $what, its flags; fails for a run that is not wanted.
name() {
    wanted "$1" "$2" || return 1
    local flags="${*:3}"
    what="--task $1$STAND_IN --model $2${flags:+ $flags}"
    flags=${flags//--/}
    name=$RUNS/$1$STAND_IN-$2${flags:+-${flags// /-}}
}

LRA="listops text retrieval image pathfinder pathx"
chains() {
    local task model size share fraction
    case "$1" in
        demo) for task in listops_demo pathfinder_demo; do for model in transformer s4; do both $task $model; done; done ;;
        demo-text) for model in rotary s4; do both text_demo $model; done ;;
        text256) for model in rotary s4; do both text256 $model; done ;;
        demo-init) for model in s4 s4_rand dlr dlr_rand; do both text_demo $model; done ;;
        table1) for task in $LRA; do both $task transformer; spt $task transformer --objective causal; done ;;
        table2)
            for task in $LRA; do for model in rotary s4; do both $task $model; done; done
            both pathx256 s4
            for task in listops text retrieval image pathfinder; do
                for model in pythia_rand pythia; do scratch $task $model; done
            done ;;
        table3)
            for model in s4 rotary; do
                both sc $model --objective causal
                for task in sc scifar bidmc_hr bidmc_rr bidmc_spo2; do both $task $model; done
            done ;;
        table7) for task in listops text image pathx; do
                for model in s4 s4_rand dlr dlr_rand; do both $task $model; done; done ;;
        table8) for task in image text; do for model in rotary s4; do
                scratch $task $model --spt-share 0
                for share in 0.2 0.4 0.6; do spt $task $model --spt-share $share; done; done; done ;;
        table9) for model in rotary s4; do
                both image $model
                for size in $SIZES; do both image $model --size $size; done; done ;;
        figure1)
            for task in $LRA; do for model in transformer rotary s4; do both $task $model; done; done
            both pathx256 s4 ;;
        figure2) chains table7 ;;
        figure3) for task in image text; do
                for fraction in 0.005 0.01 0.05 0.1 0.5 1; do both $task s4 --train-fraction $fraction; done; done ;;
        figure4) for task in image text pathx listops; do pretrain $task s4; done ;;
        figure5) for task in image text; do scratch $task rotary --spt-share 0; spt $task rotary --spt-share 0.2; done ;;
        all) for target in table1 table2 table3 table7 table8 table9 figure3; do chains $target; done ;;
        *) usage ;;
    esac
}

DEMO=''
case "$TARGET" in demo|demo-text|demo-init|text256) DEMO=1 ;; esac
# STAND_IN: what the names of tasks end in; LACKING: what has no stand-in (README says why).
case "$PRESET" in
    paper) STAND_IN='' LACKING='' SIZES="100k 300k 1m 10m" ;;
    mini) STAND_IN=_mini LACKING="retrieval sc bidmc_hr bidmc_rr bidmc_spo2 pythia" SIZES="2k 4k 10k 80k"
          ONLY_TASKS=${ONLY_TASKS//_mini/} ;;                # either name will do
    *) die "no preset '$PRESET'; there is: paper mini" ;;
esac
[ -z "$DEMO" ] || [ "$PRESET" = paper ] || die "$TARGET is small already; --preset mini is for the paper's tables and figures"
[ -z "$RAW" ] || { [ -n "$DEMO" ] && [ "$TARGET" != demo ]; } || \
    die "--raw is for demo-text, text256 and demo-init; else prepare first: python data.py --task T --raw DIR"
[ -z "$LIST" ] || [ -z "$RAW" ] || die "--list prints training only; with --raw, prepare first: python data.py --task T --raw $RAW"
[ -z "$RAW" ] || [[ $RAW == /* ]] || RAW=$HERE/$RAW
RUNS=${RUNS:-runs/$([ -n "$DEMO" ] && echo "$TARGET" || echo "$PRESET")}
[[ $RUNS =~ ^[A-Za-z0-9._/][A-Za-z0-9._/-]*$ ]] || die "RUNS must consist of letters, digits, and . _ / -: '$RUNS'"
[[ $SEEDS =~ ^(0|[1-9][0-9]*)(\ (0|[1-9][0-9]*))*$ ]] || die "seeds must be numbers, got '$SEEDS'"
[[ -z $GPUS || $GPUS =~ ^[0-9]+(\ [0-9]+)*$ ]] || die "--gpus must be numbers, got '$GPUS'"
CORES=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
JOBS=${JOBS:-$([ -n "$GPUS" ] && wc -w <<< "$GPUS" || echo "$CORES")}
[[ $JOBS =~ ^\ *[1-9][0-9]*$ ]] || die "JOBS must be a number of runs, got '$JOBS'"

# Seed by seed, so that whole tables come early.
CHAINS=$(for SEED in $SEEDS; do chains "$TARGET"; done | awk '!seen[$0]++')
[ -n "$CHAINS" ] || die "nothing to run: no chain of $TARGET is on --tasks ${ONLY_TASKS:-all} with --models ${ONLY_MODELS:-all}"
for task in ${ONLY_TASKS//,/ }; do grep -q -- "--task $task$STAND_IN " <<< "$CHAINS" || die "nothing of $TARGET is on --tasks $task"; done
for model in ${ONLY_MODELS//,/ }; do grep -q -- "--model $model " <<< "$CHAINS" || die "nothing of $TARGET is for --models $model"; done
if [ -n "$LIST" ]; then echo "$CHAINS"; exit; fi

# ---- running them ------------------------------------------------------------------------------------------------------

mkdir -p "$RUNS/output" || die "cannot write to $RUNS"
exec 8> "$RUNS/.lock"
flock -n 8 || die "another run_all.sh works on $RUNS"
# A task whose data cannot be had does not stop the others; Ctrl-C does.
unfinished=0
for task in $(grep -o -- "--task [^ ]*" <<< "$CHAINS" | cut -d " " -f 2 | sort -u); do
    code=0
    python data.py --task "$task" ${RAW:+--raw "$RAW"} || code=$?
    [ "$code" != 0 ] || continue
    [ "$code" != 130 ] || exit 130
    unfinished=1
    echo "error: no data for $task; its runs are left out" >&2
    CHAINS=$(grep -v -- "--task $task " <<< "$CHAINS") || { echo "error: nothing is left to run" >&2; exit 1; }
done
rm -f "$RUNS/finished" "$RUNS/failed.txt"
# On CPUs one thread a run: the small models are too small to share one out.
[ -n "$GPUS" ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export GPUS RUNS
outs=$(grep -o -- "--out [^ ]*" <<< "$CHAINS" | cut -d " " -f 2)
echo "$outs" > "$RUNS/queue.txt"
echo "$(wc -l <<< "$outs") runs, $JOBS side by side; the output of each chain goes to $RUNS/output/"
python analyze.py watch "$RUNS" --only "$RUNS/queue.txt" --until "$RUNS/finished" 8>&- &
WATCH=$!
trap 'kill $WATCH 2> /dev/null || true' EXIT
# The runs are a process group of their own (set -m), which is stopped as a whole, whoever stops this script and how.
stop() {
    trap "" INT TERM HUP
    for group in $(jobs -p); do kill "-$1" -- "-$group" 2> /dev/null || true; done
    exit "$2"
}
trap 'stop INT 130' INT
trap 'stop TERM 143' TERM HUP
set -m
# xargs numbers its slots; slot i works on the i-th GPU. Under eval a run is a child of bash, not bash itself: xargs would
# stop at a child that was killed.
tr '\n' '\0' <<< "$CHAINS" | xargs -0 -P "$JOBS" -n 1 --process-slot-var=SLOT bash -c '
    if [ -n "$GPUS" ]; then gpus=($GPUS); export CUDA_VISIBLE_DEVICES=${gpus[$((SLOT % ${#gpus[@]}))]}; fi
    eval "$0" > "$RUNS/output/${0##*/}.txt" 2>&1 || echo "${0##*/}" >> "$RUNS/failed.txt"' 8>&- &
set +m
code=0
wait $! || code=$?
trap - INT TERM HUP
touch "$RUNS/finished"
wait "$WATCH" || true
[ "$code" = 0 ] || { echo "error: xargs, which starts the runs, ended with code $code" >&2; unfinished=1; }
while read -r chain; do
    output=$RUNS/output/${chain##*/}.txt missing=''
    for out in $(grep -o -- "--out [^ ]*" <<< "$chain" | cut -d " " -f 2); do
        [ -e "$out/result.json" ] || { missing=$out; break; }                # what comes after it was not tried
    done
    # A chain may also fail beside an old result: that of another recipe, say.
    grep -qsxF "${chain##*/}" "$RUNS/failed.txt" || [ -n "$missing" ] || continue
    unfinished=1
    [ -e "$output" ] || { echo "error: $missing was not started" >&2; continue; }
    echo "error: ${missing:-${chain##*--out }} did not finish; $output ends with:" >&2
    tail -n 1 "$output" >&2
done <<< "$CHAINS"
finished=$(for out in $outs; do [ ! -e "$out/result.json" ] || echo "$out"; done | wc -l)
echo "$finished of $(wc -l <<< "$outs") runs are finished, after $((SECONDS / 60)) minutes"
[ "$unfinished" = 0 ] || exit 1
[ -n "$DEMO" ] || echo "tables and figures: python analyze.py all --preset $PRESET --runs $RUNS"
[ -z "$DEMO" ] || python analyze.py demo --runs "$RUNS" --figure "results/$TARGET.png"
