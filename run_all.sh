#!/usr/bin/env bash
# Trains what a table or figure needs, many runs side by side, and ends with that table or figure.
#
#   bash run_all.sh demo             {Transformer, S4} x {scratch, SPT} on scaled-down Pathfinder, 3 seeds, on a laptop
#   bash run_all.sh demo-text        {rotary Transformer, S4} x {scratch, SPT} on real film reviews; downloads IMDb
#   bash run_all.sh text256          the same with twice the text, all reviews and three times the steps
#   bash run_all.sh demo-init        {S4, DLR} x {own start, random start} x {scratch, SPT} on the reviews of demo-text
#   bash run_all.sh architectures    every model x {scratch, SPT} on the reviews of demo-text
#   bash run_all.sh own --tasks file:my.npz      your own data (or ucr:NAME): {rotary Transformer, S4} x {scratch, SPT,
#       joint training} at equal passes; with --label-fraction 0.05, --regression, --models s4,mega
#   bash run_all.sh findings1        .. findings9: the questions of results/findings.md, on these tasks and Image;
#       findings0: the trials by which their settings were chosen
#   bash run_all.sh table2           the paper's: table1 table2 table3 table7 table8 table9 figure1 .. figure5 all
#
#   --preset mini                    the paper's tables and figures at small scale: short stand-in tasks on 2 CPU cores
#   --list                           prints the commands instead, one chain a line, for any scheduler
#   --seeds 0,1,2 --tasks text,image --models s4,rotary     only these (default: three seeds of all; findings4: ten,
#                                    findings5 and findings8: five, findings0 and findings9: one)
#   --gpus 0,1,2,3                   one chain at a time on each of these GPUs
#   --raw DIR                        prepares the data from official files that you have in DIR
#
# Rerunning skips finished runs and resumes started ones. `python analyze.py status RUNS` shows what runs. Needs bash 4,
# GNU xargs and flock. Environment: JOBS=runs side by side (default: CPU cores, or GPUs)  RUNS=folder of the runs
set -euo pipefail
die() { echo "error: $*" >&2; exit 2; }
if [[ ${1:-} =~ ^(-h|--help)$ ]]; then sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit; fi

TARGET=${1:-} PRESET=paper LIST='' RAW='' GPUS='' TASKS='' MODELS='' SEEDS='' DEMO='' code=0
LABEL_FRACTION='' REGRESSION='' OWN='' NAME='' SHOW=demo FORK=''
while shift && [ $# -gt 0 ]; do
    if [ "$1" = --list ]; then LIST=1; continue; fi
    if [ "$1" = --regression ]; then REGRESSION=$1; continue; fi
    [[ $1 =~ ^--(preset|seeds|tasks|models|gpus|raw|label-fraction)$ && -n ${2:-} ]] ||
        die "unknown flag, or no value for it: $1"
    flag=${1#--} flag=${flag//-/_}
    declare "${flag^^}=$2"                                     # --seeds 0,1 is SEEDS=0,1
    shift
done
case "$TARGET" in
    demo*|text256|architectures) DEMO=$TARGET PRESET=paper ;;                            # demos are small already
    findings4) SEEDS=${SEEDS:-0,1,2,3,4,5,6,7,8,9} ;;&
    findings[58]) SEEDS=${SEEDS:-0,1,2,3,4} ;;&
    findings[09]) SEEDS=${SEEDS:-0} ;;&
    findings*) PRESET=paper RUNS=${RUNS:-runs/findings} ;;
esac
SEEDS=${SEEDS:-0,1,2}
[[ $SEEDS$GPUS =~ ^[0-9,]+$ ]] || die "--seeds and --gpus must be numbers, got '$SEEDS' and '$GPUS'"
[[ $LABEL_FRACTION =~ ^(0?\.0*[1-9][0-9]*)?$ ]] || die "--label-fraction must be between 0 and 1, got '$LABEL_FRACTION'"
LABEL_FRACTION=${LABEL_FRACTION:+0.${LABEL_FRACTION#*.}}
SEEDS=${SEEDS//,/ } GPUS=${GPUS//,/ }
if [ "$TARGET" = own ]; then
    [ -n "$TASKS" ] || die "own wants --tasks file:PATH or --tasks ucr:NAME"
    # The whole name of the task, and what data.py calls its folder; the models must have a recipe for both stages.
    names=$(PYTHONPATH=$(dirname -- "$0") python -c 'import sys, data
try: print(data.full_name(sys.argv[1]), data.folder_name(sys.argv[1]), sep="\n")
except data.UserError as error: sys.exit(f"error: {error}")
for model in filter(None, sys.argv[2].split(",")):
    import models, recipes, zoo
    try: assert model in models.MODELS and recipes.recipe_line("file:", data.FILE, model, None, "pretrain")
    except (AssertionError, data.UserError): sys.exit(f"error: own has no model {model!r}")' "$TASKS" "$MODELS") || exit 2
    OWN=${names%$'\n'*} NAME=${names##*$'\n'} DEMO=own SHOW=own PRESET=paper
    [[ $OWN == file:* || $OWN == ucr:* ]] || die "own wants --tasks file:PATH or --tasks ucr:NAME; got '$TASKS'"
elif [ -n "$LABEL_FRACTION$REGRESSION" ]; then
    die "--label-fraction and --regression are for: run_all.sh own"
else
    TASKS=${TASKS//_mini/}
fi
RUNS=${RUNS:-runs/${DEMO:-$PRESET}${NAME:+/$NAME}}
[[ $RUNS =~ ^[A-Za-z0-9._/][A-Za-z0-9._/-]*$ ]] || die "RUNS must consist of letters, digits, and . _ / -: '$RUNS'"
JOBS=${JOBS:-$([ -n "$GPUS" ] && wc -w <<< "$GPUS" || OMP_NUM_THREADS='' nproc)}
[ -z "$RAW" ] || RAW=$(realpath -- "$RAW")
cd -- "$(dirname -- "$0")" > /dev/null

# ---- which runs ------------------------------------------------------------------------------------------------------

# SIZE: --arch of table 9's sizes. BUDGET: what both stages have together in table 8. FIRST, AFTER, ALONE: what figure 3
# changes in pretraining, in finetuning after it, and from scratch. analyze.py has the same; a test compares the two.
# MINI: what the names of stand-ins end in. LACKING: what has no stand-in.
declare -A SIZE BUDGET FIRST AFTER ALONE
case "$PRESET" in
    paper) MINI='' LACKING='' LONGER="--warmup 200 --schedule constant"
        SIZE=([rotary]="100k:d=48,ff=72 300k:d=80,ff=160 1m:d=144,ff=288 10m:d=448,ff=896"
              [s4]="100k:d=64 300k:d=128 1m:d=256 10m:d=832,state=128")
        BUDGET=([image]="--epochs 150" [text]="--epochs 30")
        FIRST=([image]=" --lr 0.01 --batch 50 --steps 10000" [text]=" --steps 40000")
        AFTER=([image]="--lr 0.002 --batch 50 $LONGER" [text]="--epochs 200 $LONGER")
        ALONE=([image]=" --lr 0.002 $LONGER" [text]=" --lr 0.001 --epochs 200 $LONGER") ;;
    mini) MINI=_mini LACKING="retrieval sc bidmc_hr bidmc_rr bidmc_spo2 pythia"
        SIZE=([rotary]="2k:d=8,ff=16 4k:d=12,ff=24 10k:d=20,ff=40 80k:d=56,ff=112"
              [s4]="2k:d=10 4k:d=16 10k:d=30 80k:d=104")
        BUDGET=([image]="--steps 2000" [text]="--steps 2000") ;;
    *) die "no preset '$PRESET'; there is: paper mini" ;;
esac
LRA="listops text retrieval image pathfinder pathx"
# Learning rates of pretraining, finetuning and training from scratch, and the models for which each of them is the best
# of three (results/architectures.md).
RATES="3e-3/3e-3/3e-3 transformer
3e-3/1e-3/3e-3 rotary linear performer_relu
9e-3/1e-3/1e-3 local bigbird
9e-3/1e-3/3e-3 longformer
3e-3/3e-3/1e-3 linformer
9e-3/3e-3/3e-3 reformer spade
3e-3/1e-3/1e-3 performer
9e-3/3e-3/1e-3 mega
9e-3/9e-3/3e-3 mega_chunk s4_rand dlr s4d_inv s4d_legs s5 lru sgconv
9e-3/9e-3/9e-3 s4 dlr_rand dfout s4d"

# Each line that these functions print is a chain: one command, or two stages joined by &&, so that every line can run
# anywhere, in any order. Arguments: TASK MODEL, then a word for the run's name and flags of the first and second stage.
out() { echo "$RUNS/${NAME:-$2$MINI}-$3${4:+-$4}-$1-s$SEED"; }
stage() { echo "python $FORK$1.py --task $3$MINI --model $4${6:+ $6} --seed $SEED --resume --out $(out "${@:2}")"; }
scratch() { stage finetune scratch "$@"; }
joint() { stage finetune joint "$1" "$2" "${3:-}" "--joint ${5:-1}${4:+ $4}"; }
pretrain() { stage pretrain pretrain "$@"; }
after() {         # TASK MODEL, word and flags of the first stage, then of one or more second stages, which inherit task,
    # model, objective, --arch and --train-fraction
    local task=$1 model=$2 init chain
    init=$(out pretrain "${@:1:3}") chain=$(pretrain "${@:1:4}")
    shift 4
    while [ $# -gt 0 ]; do
        chain+=" && python ${FORK}finetune.py --init $init${2:+ $2} --seed $SEED --resume"
        chain+=" --out $(out spt "$task" "$model" "$1")"
        shift 2
    done
    echo "$chain"
}
spt() { after "$1" "$2" "${3:-}" "${4:-}" "${3:-}" "${5:-}"; }
both() { scratch "$@"; spt "$@"; }
small() { every scratch "$@"; every spt "$@"; }
sizes() { for s in ${SIZE[$2]}; do both "$1" "$2" "${s%%:*}" "--arch ${s#*:}"; done; }
budget() {        # TASK MODEL, percent for pretraining
    local total=${BUDGET[$1]##* } unit=${BUDGET[$1]% *}
    if [ "$3" = 0 ]; then scratch "$1" "$2" budget0 "$unit $total"; return; fi
    spt "$1" "$2" "budget$3" "$unit $((total * $3 / 100))" "$unit $((total - total * $3 / 100))"
}
part() {          # TASK MODEL, share of the training examples
    scratch "$1" "$2" "data$3" "--train-fraction $3${ALONE[$1]:-}"
    spt "$1" "$2" "data$3" "--train-fraction $3${FIRST[$1]:-}" "${AFTER[$1]:-}"
}
own() {           # models; a smaller share of the labels takes the same pretraining
    local labels=${LABEL_FRACTION:+--label-fraction $LABEL_FRACTION} word=${LABEL_FRACTION:+l$LABEL_FRACTION} task model
    task=$(printf %q "$OWN")
    for model in $1; do scratch "$task" "$model" "$word" "$labels"; done
    for model in $1; do after "$task" "$model" '' '' "$word" "$labels"; done
    for model in $1; do joint "$task" "$model" "$word" "$labels"; done
}
rated() {         # TASK MODEL, rates of the first stage, the second, and from scratch; word and flags
    scratch "$1" "$2" "${6:-}" "--lr $5${7:+ $7}"
    spt "$1" "$2" "${6:-}" "--lr $3${7:+ $7}" "--lr $4"
}
every() {         # FUNCTION, tasks, models, further arguments; only what is asked for and can be made
    local task model
    for task in $2; do for model in $3; do
        [[ -z $TASKS || ,$TASKS, == *,$task,* ]] && [[ -z $MODELS || ,$MODELS, == *,$model,* ]] || continue
        [[ " $LACKING " == *" $task "* || " $LACKING " == *" $model "* ]] || "$1" "$task" "$model" "${@:4}"
    done; done
}
chains() {
    case "$1" in
        demo) small pathfinder_demo "transformer s4" ;;
        demo-text) small text_demo "rotary s4" ;;
        text256) small text256 "rotary s4" ;;
        own) own "$(tr , ' ' <<< "${MODELS:-rotary s4}")" ;;
        demo-init) small text_demo "s4 s4_rand dlr dlr_rand" ;;
        architectures) while IFS='/ ' read -r first after alone models; do
                every rated text_demo "$models" "$first" "$after" "$alone"; done <<< "$RATES" ;;
        table1) every both "$LRA" transformer; every spt "$LRA" transformer causal "--objective causal" ;;
        table2) every both "$LRA" "rotary s4"; every both pathx256 s4
                every scratch "listops text retrieval image pathfinder" "pythia_rand pythia" ;;
        table3) every both sc "s4 rotary" causal "--objective causal"
                every both "sc scifar bidmc_hr bidmc_rr bidmc_spo2" "s4 rotary" ;;
        table7|figure2) every both "listops text image pathx" "s4 s4_rand dlr dlr_rand" ;;
        table8) for share in 0 20 40 60; do every budget "image text" "rotary s4" $share; done ;;
        table9) every both image "rotary s4"; every sizes image "rotary s4" ;;
        findings[0-9]) source results/findings/runs.sh; findings "${1#findings}" | settled ;;
        figure1) every both "$LRA" "transformer rotary s4"; every both pathx256 s4 ;;
        figure3) for share in 0.005 0.01 0.05 0.1 0.5 1; do every part "image text" s4 $share; done ;;
        figure4) every pretrain "image text pathx listops" s4 ;;
        figure5) for share in 0 20; do every budget "image text" rotary $share; done ;;
        all) for target in table1 table2 table3 table7 table8 table9 figure3; do chains $target; done ;;
        *) die "no target '$1'; there is: demo demo-text text256 demo-init architectures own findings{0..9}" \
                 "table{1,2,3,7,8,9} figure{1..5} all" ;;
    esac
}
CHAINS=$(for SEED in $SEEDS; do chains "$TARGET"; done | awk '!seen[$0]++')                # whole tables come early
[ -z "$OWN" ] || TASKS=''
for flag in task.${TASKS//,/ task.} model.${MODELS//,/ model.}; do
    [[ $flag == *. || $CHAINS == *"--${flag/./ }"[\ _]* ]] || die "no chain of $TARGET is for --${flag/./s }"
done
prepare() {       # TASK; no official files hold a demo's Pathfinder or ListOps
    local raw=$RAW
    [[ $1 != pathfinder_demo && $1 != listops_demo ]] || raw=''
    python data.py --task "$1" ${raw:+--raw "$raw"} $REGRESSION
}
if [ -n "$LIST" ]; then
    # Elsewhere, a chain must know how its data is to be read.
    [ -z "$OWN" ] || FIRST="python data.py --task $(printf %q "$OWN")${RAW:+ --raw $(printf %q "$RAW")}${REGRESSION:+ $REGRESSION} && "
    while read -r chain; do echo "${OWN:+$FIRST}$chain"; done <<< "$CHAINS"
    exit
fi

# ---- running them ----------------------------------------------------------------------------------------------------

if [ -n "$OWN" ]; then prepare "$OWN" || exit $?; fi           # before there is a folder for its runs
mkdir -p "$RUNS/output" || die "cannot write to $RUNS"
exec 8> "$RUNS/.lock"
flock -n 8 || die "another run_all.sh works on $RUNS"
exec 9>&2
[ "$TARGET" != demo ] || exec 9> "$RUNS/output/data.txt"       # a second's work; the first line is how long all takes
for task in $([ -n "$OWN" ] || grep -o -- "--task [^ ]*" <<< "$CHAINS" | cut -d " " -f 2 | sort -u); do
    prepare "$task" >&9 2>&9 && continue
    [ $? != 130 ] || exit 130                                  # Ctrl-C
    code=1
    [ "$TARGET" != demo ] || tail -n 1 "$RUNS/output/data.txt" >&2
    echo "error: no data for $task; its runs are left out" >&2
    CHAINS=$(grep -v -- "--task $task " <<< "$CHAINS") || { echo "error: nothing is left to run" >&2; exit 1; }
done
# On CPUs: one thread a run, and glibc keeps freed memory, whose return to the system takes up to a tenth of the time.
[ -n "$GPUS" ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MALLOC_{TRIM,MMAP}_THRESHOLD_=1073741824
export GPUS RUNS
# With set -m, what runs in the background is a process group of its own, and one signal ends all of it.
set -m
stop() { kill -- $(jobs -p | sed 's/^/-/') 2> /dev/null || true; exit "$1"; }
trap 'stop 130' INT
trap 'stop 143' TERM HUP

pool() {          # runs chains, $JOBS side by side; xargs numbers its slots, and slot i works on the i-th GPU
    xargs -d '\n' -P "$JOBS" -n 1 --process-slot-var=SLOT bash -c '
        if [ -n "$GPUS" ]; then gpus=($GPUS); export CUDA_VISIBLE_DEVICES=${gpus[SLOT % ${#gpus[@]}]}; fi
        output=$RUNS/output/${0##*/}.txt
        eval "$0" > "$output" 2>&1 && exit
        echo "error: ${0##*/} did not finish; $output ends with: $(tail -n 1 "$output")" >&2
        exit 1' <<< "$1" 8>&- &
    wait $! || code=1
}

if [ -n "$DEMO" ]; then                                        # one seed after another, with the table so far
    python analyze.py forecast "$JOBS" <<< "$CHAINS" 8>&- &
    for seed in $SEEDS; do
        pool "$(grep -- "--seed $seed " <<< "$CHAINS")"
        python analyze.py "$SHOW" --runs "$RUNS" --figure "$RUNS/$TARGET.png" || code=1
    done
    kill %1 2> /dev/null || true                               # it still waits where no run had to be made
else
    echo "$JOBS chains run side by side; the output of each goes to $RUNS/output/"
    pool "$CHAINS"
    if [[ $TARGET == findings* ]]; then python results/findings/tables.py "${TARGET#findings}" --runs "$RUNS"
    else python analyze.py $(sed 's/[0-9]/ &/' <<< "$TARGET") --preset "$PRESET" --runs "$RUNS"; fi || code=1
fi
echo "$TARGET took $((SECONDS / 60)) minutes"
[ $code = 0 ] || echo "error: some runs are missing; the same command again makes them" >&2
exit $code
