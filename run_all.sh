#!/usr/bin/env bash
# Chains the stages. Holds no hyper-parameter: those are the recipes in pretrain.py and finetune.py.
#
#   bash run_all.sh demo             {Transformer, S4} x {scratch, SPT} on two generated tasks, 3 seeds, on a laptop
#   bash run_all.sh demo-text        {rotary Transformer, S4} x {scratch, SPT} on real film reviews; downloads IMDb
#   bash run_all.sh text256          the same with twice the text, all reviews and three times the steps
#   bash run_all.sh demo-init        {S4, DLR} x {own start, random start} x {scratch, SPT} on the reviews of demo-text
#   bash run_all.sh demo-text --raw DIR      the aclImdb_v1.tar.gz that you have in DIR, instead of downloading
#   bash run_all.sh TARGET --list    prints the commands instead, one chain a line, for any scheduler
#
# Rerunning goes on where it was stopped: finished runs are skipped, started ones resumed.
# Environment: SEEDS="0 1 2"  JOBS=number of runs side by side (default: CPU cores)  RUNS=folder of the runs
set -euo pipefail
cd "$(dirname "$0")"

SEEDS=${SEEDS:-0 1 2}
JOBS=${JOBS:-$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')}

# One chain a line. Stages of a chain are joined by &&, so that every line can run anywhere, in any order.
chains() {
    local seed task model name common
    for seed in $SEEDS; do
        for task in $TASKS; do
            for model in $MODELS; do
                name=$task-$model
                common="--task $task --model $model --seed $seed --resume"
                echo "python finetune.py $common --out $RUNS/$name-scratch-s$seed"
                echo "python pretrain.py $common --out $RUNS/$name-pretrain-s$seed &&" \
                     "python finetune.py $common --init $RUNS/$name-pretrain-s$seed --out $RUNS/$name-spt-s$seed"
            done
        done
    done
}

run_demo() {
    local task list jobs unfinished=0 out
    for task in $TASKS; do python data.py --task "$task" ${RAW:+--raw "$RAW"}; done
    mkdir -p "$RUNS"
    rm -f "$RUNS/finished"
    # One thread a run: these models are too small to share one out.
    export OMP_NUM_THREADS=1
    list=$(chains)
    jobs=$(grep -o -- "--out " <<< "$list" | wc -l)
    echo "$jobs runs, $JOBS side by side; their output goes to $RUNS/output.txt"
    {
        tr '\n' '\0' <<< "$list" | xargs -0 -P "$JOBS" -n 1 bash -c > "$RUNS/output.txt" 2>&1 || true
        touch "$RUNS/finished"
    } &
    python analyze.py watch "$RUNS" --jobs "$jobs" --until "$RUNS/finished"
    wait
    for out in $(grep -o -- "--out [^ ]*" <<< "$list" | cut -d " " -f 2); do
        [ -e "$out/result.json" ] || { echo "error: $out did not finish" >&2; unfinished=1; }
    done
    if [ "$unfinished" = 1 ]; then
        echo "the end of $RUNS/output.txt:" >&2
        tail -n 20 "$RUNS/output.txt" >&2
        exit 1
    fi
    python analyze.py demo --runs "$RUNS" --figure "results/$TARGET.png"
}

usage() {
    echo "usage: bash run_all.sh demo|demo-text|text256|demo-init [--raw DIR] [--list]" >&2
    exit 2
}

TARGET=${1:-} LIST='' RAW=''
case "$TARGET" in
    demo) TASKS="listops_demo pathfinder_demo" MODELS="transformer s4" ;;
    demo-text) TASKS="text_demo" MODELS="rotary s4" ;;
    text256) TASKS="text256" MODELS="rotary s4" ;;
    demo-init) TASKS="text_demo" MODELS="s4 s4_rand dlr dlr_rand" ;;
    *) usage ;;
esac
shift
while [ $# -gt 0 ]; do
    case "$1" in
        --list) LIST=1; shift ;;
        --raw) [ "$TARGET" != demo ] && [ -n "${2:-}" ] || usage; RAW=$2; shift 2 ;;
        *) usage ;;
    esac
done
[ -z "$LIST" ] || [ -z "$RAW" ] || { echo "error: --list prints training only; with --raw, prepare first:" \
    "python data.py --task $TASKS --raw $RAW" >&2; exit 2; }
RUNS=${RUNS:-runs/$TARGET}
[[ $RUNS != *[[:space:]]* ]] || { echo "error: RUNS must not contain spaces: '$RUNS'" >&2; exit 2; }
[[ $JOBS =~ ^[1-9][0-9]*$ ]] || { echo "error: JOBS must be a number of runs, got '$JOBS'" >&2; exit 2; }
[[ $SEEDS =~ ^[0-9]+(\ [0-9]+)*$ ]] || { echo "error: SEEDS must be numbers with spaces between, got '$SEEDS'" >&2; exit 2; }

if [ -n "$LIST" ]; then chains; else run_demo; fi
