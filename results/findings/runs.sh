# The runs of results/findings.md, for run_all.sh, whose functions these use. tables.py names the same in QUESTIONS.

settled() {       # chains -> the same with ten evaluations for each arm, so that validation has as many checkpoints to
    # choose from, and with the rate of S4 on text that findings0 chose; runs of `architectures`, -rated-, stay
    local rules='' runs scratch spt joint rate='s#(pretrain|finetune).py ([^&]*/text_demo-s4-)#\1.py --lr 1e-2 \2#g'
    while read -r runs scratch spt joint; do
        rules+="s#finetune.py ([^&]*/$runs-[^& ]*scratch-s)#finetune.py --eval-every $scratch \\1#g;"
        rules+="s#finetune.py ([^&]*/$runs-[^& ]*spt-s)#finetune.py --eval-every $spt \\1#g;"
        rules+="s#finetune.py ([^&]*/$runs-[^& ]*joint-s)#finetune.py --eval-every $joint \\1#g;"
    done <<< "text256 600 200 300
text_demo 200 70 100
pathfinder_demo-(transformer|rotary) 270 140 135
pathfinder_demo-(s4|s4d|s4_rand|dfout|dlr|dlr_rand) 190 90 95"
    sed -E "/-rated-|--eval-every/!{$rules}; /-rated-|--lr/!$rate"
}
# Joint training: weight of the masked loss and rate, the best of its trials on validation (findings0).
declare -A JOINT=([pathfinder_demo-transformer]="1 --lr 3e-3" [pathfinder_demo-rotary]="0.1 --lr 3e-3"
    [pathfinder_demo-s4]="0.1 --lr 1e-2" [text_demo-rotary]="0.3 --lr 3e-3" [text_demo-s4]="0.3 --lr 1e-2"
    [text256-rotary]="3 --lr 3e-3" [text256-linear]="0.3 --lr 3e-3" [text256-s4]="1 --lr 1e-2")
weights() {       # TASK MODEL RATE; four weights of the masked loss
    local weight
    for weight in 0.1 0.3 1 3; do joint "$1" "$2" "lr$3-w$weight" "--lr $3" $weight; done
}
tuned() {         # TASK MODEL, word and flags
    local best=${JOINT[$1-$2]}
    joint "$1" "$2" "${3:-}" "${best#* }${4:+ $4}" "${best%% *}"
}
three() { both "$@"; tuned "$@"; }
few() {           # TASK MODEL; all inputs, and a share of the labels, which are soon known by heart
    local share shares=() often="--eval-every 50"
    for share in 0.01 0.05 0.25; do
        scratch "$1" "$2" "l$share" "--label-fraction $share $often"
        tuned "$1" "$2" "l$share" "--label-fraction $share $often"
        shares+=("l$share" "--label-fraction $share $often")
    done
    scratch "$1" "$2"
    tuned "$1" "$2"
    after "$1" "$2" '' '' '' '--eval-every 70' "${shares[@]}"
}
fraction() {      # TASK MODEL, share of the data, without which nothing is seen in either stage
    scratch "$1" "$2" "f$3" "--train-fraction $3 --eval-every 50"
    spt "$1" "$2" "f$3" "--train-fraction $3" "--eval-every 50"
}
twentieth() {     # TASK MODEL, flags that set its rate, other rates on the labels
    local rate few="--train-fraction 0.05" often="--eval-every 50" arms=(f0.05 "--eval-every 50${3:+ $3}")
    scratch "$1" "$2" f0.05 "$few $often${3:+ $3}"
    for rate in "${@:4}"; do
        scratch "$1" "$2" "f0.05-lr$rate" "$few $often --lr $rate"
        arms+=("f0.05-lr$rate" "$often --lr $rate")
    done
    after "$1" "$2" f0.05 "$few${3:+ $3}" "${arms[@]}"
}
less() {          # TASK MODEL, share of the training examples, of which the first eighth has labels
    spt "$1" "$2" "n$3" "--train-fraction $3" "--train-fraction 0.125"
}
forked() {        # FUNCTION, its arguments
    local chain FORK=runs/fork/
    chain=$("$@")
    echo "bash results/findings/fork.sh && $chain"
}
hidden() {        # TASK MODEL, what is hidden, word and flags
    forked spt "$1" "$2" "$3${4:+-$4}" "--hide $3${5:+ $5}"
}
taken() {         # TASK MODEL, kinds of parameters
    local kind kinds=()
    for kind in "${@:3}"; do kinds+=("$kind" "--take $kind"); done
    for kind in "${@:3}"; do kinds+=("$kind-rewind" "--take $kind --rewind"); done
    forked after "$1" "$2" '' '' '' '' "${kinds[@]}"
}
findings() {      # number of a question
    local value path=pathfinder_demo starts="s4 s4d dfout dlr s4_rand dlr_rand"
    case "$1" in
        0) for value in 0.001 0.003 0.01; do
               every weights $path "transformer rotary" $value; every weights text_demo rotary $value
           done
           for value in 0.003 0.01 0.03; do every weights $path s4 $value; done
           for value in 0.001 0.004 0.01; do every weights text_demo s4 $value; done
           every scratch $path "transformer rotary"; every both $path "$starts"
           for value in 0.0003 0.003; do every scratch $path "transformer rotary" lr$value "--lr $value"; done
           every both text_demo s4; every rated text_demo s4 4e-3 4e-3 4e-3 lr0.004
           every both text256 s4; every rated text256 s4 1e-2 1e-2 1e-2 lr0.01
           every rated $path "$starts" 3e-3 3e-3 3e-3 lr0.003
           for value in 0.001 0.003 0.01; do every joint text256 "rotary linear" lr$value-w0.3 "--lr $value" 0.3; done
           for value in 1 3; do every joint text256 "rotary linear" lr0.003-w$value "--lr 0.003" $value; done
           for value in 0.3 1 3; do every joint text256 s4 lr0.01-w$value "--lr 0.01" $value; done
           every joint text256 s4 lr0.004-w0.3 "--lr 0.004" 0.3
           for value in 0.003 0.01; do every joint text_demo rotary lr$value-w0.3-again "--lr $value" 0.3; done
           every twentieth text_demo rotary '' 0.0003 0.003                                  # few labels' second chance
           every twentieth text_demo s4 "--lr 1e-2" 0.001 0.003
           every spt $path transformer                                                      # question 6's second chance
           every hidden $path transformer runs3; every hidden $path transformer patches
           for value in 0.001 0.01; do
               every spt $path transformer lr$value "--lr $value"
               every hidden $path transformer runs3 lr$value "--lr $value"
               every hidden $path transformer patches lr$value "--lr $value"
           done
           every spt text_demo rotary; every spt text_demo rotary lr0.01 "--lr 0.01"
           every hidden text_demo rotary runs10; every hidden text_demo rotary runs10 lr0.01 "--lr 0.01" ;;
        1) every three text256 "rotary linear s4"; every three $path "transformer s4"
           every scratch $path s4 s900 "--steps 900 --eval-every 90" ;;
        2) every few text_demo "rotary s4"
           for value in 0.05 0.25; do every fraction text_demo "rotary s4" $value; done ;;
        3) every both $path "s4 s4d"; every both $path s4d short "--arch dt_max=0.01"
           every rated $path "dfout dlr s4_rand dlr_rand" 3e-3 3e-3 3e-3 lr0.003
           every scratch $path "s4_rand dlr_rand" lr0.003-long "--lr 3e-3 --steps 7600 --eval-every 760"
           every spt $path "s4_rand dlr_rand" lr0.003-long "--lr 3e-3 --steps 4000" \
               "--lr 3e-3 --steps 3600 --eval-every 360"
           every rated text_demo "s4 dlr_rand dfout s4d" 9e-3 9e-3 9e-3 rated
           every rated text_demo "s4_rand dlr" 9e-3 9e-3 3e-3 rated
           every rated text_demo s4d 9e-3 9e-3 9e-3 rated-short "--arch dt_max=0.01" ;;
        4) every three $path rotary; every tuned $path transformer; every tuned $path transformer max "--pool max"
           every scratch $path transformer; every scratch $path transformer max "--pool max"
           every after $path transformer '' '' '' '' max "--pool max"
           every joint $path transformer lr0.003-w0.1 "--lr 0.003" 0.1 ;;                        # joint's second chance
        5) every scratch $path transformer
           for value in 1400 4200; do
               every scratch $path transformer s$value "--steps $value --eval-every $((value / 10))"
           done
           for value in 175 350 700 1400 2800; do every spt $path transformer p$value "--steps $value"; done
           for value in 0.125 0.25 0.5; do every scratch $path transformer n$value "--train-fraction $value"; done
           for value in 0.125 0.25 0.5 1; do every less $path transformer $value; done ;;
        6) every spt $path transformer; every spt text_demo rotary
           every spt $path transformer lr0.01 "--lr 0.01"; every spt $path transformer p2800 "--steps 2800"
           for value in runs3 runs10 patches rows; do
               every hidden $path transformer $value; every hidden $path transformer $value lr0.01 "--lr 0.01"
           done
           every hidden $path transformer runs3 p2800 "--steps 2800"
           every hidden $path transformer patches p2800 "--steps 2800"
           every hidden text_demo rotary runs3; every hidden text_demo rotary runs10
           for value in 0.15 0.5; do
               every spt $path transformer m$value "--mask $value"; every spt text_demo rotary m$value "--mask $value"
           done ;;
        7) every both text_demo "rotary s4"; every both text_demo "rotary s4" causal "--objective causal" ;;
        8) every scratch $path transformer s1400 "--steps 1400 --eval-every 140"
           every scratch text_demo "rotary s4" s700 "--steps 700 --eval-every 70"
           every taken $path transformer qk v mixers others; every taken text_demo rotary qk v mixers others
           every taken text_demo s4 A BC mixers others ;;
        9) every scratch image s4 100k "--arch d=64 --epochs 8"
           every scratch image s4 100k-e4 "--arch d=64 --epochs 4 --batch 64 --warmup 200"
           every after image s4 100k "--arch d=64 --epochs 4" 100k "--epochs 4 --batch 64 --warmup 200" \
               100k-lr0.01 "--lr 1e-2 --epochs 4 --batch 64 --warmup 200" ;;                # SPT's second chance
    esac
}
