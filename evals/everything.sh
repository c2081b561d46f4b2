#!/bin/sh
# Measure what needs a GPU, the most useful first. Each command writes its figures into results/gpu-*.json, and what it
# prints onto the page docs/gpu.md:
#
#     sh evals/everything.sh
#     timeout 8m sh evals/everything.sh           at most eight minutes: the page keeps what was measured until then
cd "$(dirname "$0")/.." || exit
page=docs/gpu.md
echo "# On a GPU" > $page

measure() {     # a heading and a command. If it fails, the page says why, and the next command follows
    echo "$1" >&2
    printf '\n## %s\n\n```sh\n' "$1" >> $page
    shift
    printf '%s\n```\n\n```\n' "$*" >> $page
    "$@" >> $page 2> gpu.err || printf 'failed: %s\n' "$(tail -n 1 gpu.err)" >> $page
    printf '```\n' >> $page
    rm gpu.err
}

measure "The kernels against float64" python -m pytest tests/test_kernels.py tests/test_recurrent_kernels.py
for T in 4096 16384 1024 65536; do
    measure "The kernels, and those of others, at T = $T" \
        python eval.py speed --kernels --lengths=$T --repeats=10 --out=results/gpu-kernels-$T.json
done
# six models at a time, with softmax twice, fit into the memory
for attn in $(python -c "import mixers; print(*mixers.trained_recipes())" | xargs -n 6 | tr ' ' ,); do
    measure "Training steps of GPT-2 small: ${attn%%,*} and others" \
        python eval.py speed --attn=$attn --lengths=1024 --tokens=16384 --n_layer=12 --n_head=12 --n_embd=768 \
        --vocab_size=50304 --memory= --repeats=5 --out=results/gpu-steps-${attn%%,*}.json
done
measure "A trained TDA" python train.py --attn=tda --max_iters=500 --eval_interval=500 --out_dir=out/gpu-tda
measure "Its skipped tiles" python eval.py speed --live --out_dir=out/gpu-tda --lengths=256,1024,4096 \
    --out=results/gpu-live.json
for T in 4096 16384 65536 262144 1048576; do
    measure "Sparse Focus and full attention at T = $T" \
        python eval.py speed --focus --n_head=4 --lengths=$T --repeats=5 --out=results/gpu-focus-$T.json
done
for T in 4096 16384; do
    measure "States and softmax at T = $T" \
        python eval.py speed --attn=softmax,linear_state,retnet,gla,mamba2,deltanet,gated_deltanet --lengths=$T \
        --tokens=16384 --n_layer=2 --n_head=4 --n_embd=256 --memory= --repeats=10 --out=results/gpu-states-$T.json
done
