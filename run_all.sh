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
JOBS=${JOBS:-$(python3 -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')}

# One chain a line. Stages of a chain are joined by &&, so that every line can run anywhere, in any order.
demo_chains() {
    for seed in $SEEDS; do
        for task in listops_demo pathfinder_demo; do
            for model in rotary s4; do
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
    # One thread a run: the models are small, and two runs side by side use two cores better than one run does.
    export OMP_NUM_THREADS=1
    chains=$(demo_chains)
    jobs=$(grep -o "\.py" <<< "$chains" | wc -l)
    echo "$jobs runs, $JOBS side by side; their output goes to $RUNS/output.txt"
    { xargs -P "$JOBS" -d '\n' -I{} bash -c '{}' <<< "$chains" > "$RUNS/output.txt" 2>&1 || true; touch "$RUNS/finished"; } &
    python analyze.py watch "$RUNS" --jobs "$jobs" --until "$RUNS/finished"
    wait
    if [ "$(ls "$RUNS"/*/result.json 2>/dev/null | wc -l)" -lt "$jobs" ]; then
        echo "error: some runs did not finish; the last lines of $RUNS/output.txt:" >&2
        grep -a "error" "$RUNS/output.txt" | tail -n 5 >&2
        exit 1
    fi
    python analyze.py demo --runs "$RUNS"
}

case "${1:-}" in
    demo)
        RUNS=${RUNS:-runs/demo}
        if [ "${2:-}" = "--list" ]; then demo_chains; else run_demo; fi ;;
    *)
        echo "usage: bash run_all.sh demo [--list]" >&2
        exit 2 ;;
esac
