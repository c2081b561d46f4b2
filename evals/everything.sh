#!/bin/sh
# Every command of docs/papers.md, or on a GPU what only a GPU can measure, in ten minutes at most:
#
#     sh evals/everything.sh          papers without an NVIDIA GPU, gpu with one
#     sh evals/everything.sh papers
#     sh evals/everything.sh gpu
#
# A command that fails or takes too long does not stop the next one. The last table has the seconds
# and the exit code of each.
cd "$(dirname "$0")/.." || exit
mkdir -p out
seconds=out/everything.txt
: > $seconds

run() {                                         # run LIMIT COMMAND...
    limit=$1 start=$(date +%s)
    shift
    echo "+ $*"
    timeout "$limit" "$@"
    code=$?
    echo "$(($(date +%s) - start)) s, exit $code: $*" >> $seconds
}

gpu() {
    run 200 python -m pytest tests/test_kernels.py tests/test_recurrent_kernels.py
    run 2m python eval.py speed --kernels --repeats=10 --out=out/gpu-kernels.json
    run 90 python eval.py speed --attn=softmax,elastic,entmax,tda,sigmoid,gated_deltanet --lengths=1024 \
        --tokens=16384 --n_layer=12 --n_head=12 --n_embd=768 --vocab_size=50304 --memory= --repeats=5
    run 1m python train.py --attn=softmax --max_iters=500 --out_dir=out/gpu-softmax
    run 1m python train.py --attn=tda --max_iters=500 --out_dir=out/gpu-tda
    run 30 python eval.py speed --live --out_dir=out/gpu-tda --lengths=1024,4096
}

# The page's blocks of commands make the runs that its rows read. Then come the rows, the shortest
# first: column 4 of a row has its minutes, column 3 its commands.
commands() {
    sed -n '/^```sh/,/^```/p' docs/papers.md | sed '/^```/d; s/ *#.*//'
    grep '^|.*`' docs/papers.md | awk -F'|' '{print ($5 == " - " ? 99 : $5) "|" $4}' | sort -s -n |
        grep -oE '`(python|torchrun) [^`]*`' | tr -d '`'
}

papers() {
    commands | grep -v '^$' | awk '!seen[$0]++' | while read -r line; do
        eval "run 1h $line" < /dev/null
    done
}

default=papers
command -v nvidia-smi > /dev/null && default=gpu
case ${1:-$default} in
    papers) papers ;;
    gpu) gpu ;;
    *) echo "usage: sh evals/everything.sh [papers|gpu]" >&2; exit 2 ;;
esac
cat $seconds
