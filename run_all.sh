#!/usr/bin/env bash
# Chains the stages. Holds no hyper-parameter: those are the recipes in pretrain.py and finetune.py.
#
#   bash run_all.sh demo             {Transformer, S4} x {scratch, SPT} on two generated tasks, 3 seeds, on a laptop
#   bash run_all.sh demo --list      prints the commands instead, one chain a line, for any scheduler
#
# Rerunning goes on where it was stopped: finished runs are skipped, started ones resumed.
# Environment: SEEDS="0 1 2"  JOBS=number of runs side by side (default: CPU cores)  RUNS=folder of the runs
set -euo pipefail
cd "$(dirname "$0")"

SEEDS=${SEEDS:-0 1 2}
JOBS=${JOBS:-$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')}

# One chain a line. Stages of a chain are joined by &&, so that every line can run anywhere, in any order.
demo_chains() {
    for seed in $SEEDS; do
        for task in listops_demo pathfinder_demo; do
            for model in transformer s4; do
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
    for task in listops_demo pathfinder_demo; do python data.py --task $task; done
    mkdir -p "$RUNS"
    rm -f "$RUNS/finished"
    # One thread a run: these models are too small to share one out.
    export OMP_NUM_THREADS=1
    local chains jobs unfinished=0 out
    chains=$(demo_chains)
    jobs=$(grep -o -- "--out " <<< "$chains" | wc -l)
    echo "$jobs runs, $JOBS side by side; their output goes to $RUNS/output.txt"
    {
        tr '\n' '\0' <<< "$chains" | xargs -0 -P "$JOBS" -n 1 bash -c > "$RUNS/output.txt" 2>&1 || true
        touch "$RUNS/finished"
    } &
    python analyze.py watch "$RUNS" --jobs "$jobs" --until "$RUNS/finished"
    wait
    for out in $(grep -o -- "--out [^ ]*" <<< "$chains" | cut -d " " -f 2); do
        [ -e "$out/result.json" ] || { echo "error: $out did not finish" >&2; unfinished=1; }
    done
    if [ "$unfinished" = 1 ]; then
        echo "the end of $RUNS/output.txt:" >&2
        tail -n 20 "$RUNS/output.txt" >&2
        exit 1
    fi
    python analyze.py demo --runs "$RUNS"
}

RUNS=${RUNS:-runs/demo}
[[ $RUNS != *[[:space:]]* ]] || { echo "error: RUNS must not contain spaces: '$RUNS'" >&2; exit 2; }
[[ $JOBS =~ ^[1-9][0-9]*$ ]] || { echo "error: JOBS must be a number of runs, got '$JOBS'" >&2; exit 2; }
[[ $SEEDS =~ ^[0-9]+(\ [0-9]+)*$ ]] || { echo "error: SEEDS must be numbers with spaces between, got '$SEEDS'" >&2; exit 2; }

case "${1:-} ${2:-}" in
    "demo "|"demo --list")
        if [ "${2:-}" = "--list" ]; then demo_chains; else run_demo; fi ;;
    *)
        echo "usage: bash run_all.sh demo [--list]" >&2
        exit 2 ;;
esac
