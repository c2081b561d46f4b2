#!/bin/sh
# What needs a GPU, in ten minutes at most. A command that fails or takes too long does not stop the next.
cd "$(dirname "$0")/.." || exit
set -x                                          # prints each command

timeout 4m python -m pytest tests/test_kernels.py tests/test_recurrent_kernels.py
timeout 2m python eval.py speed --kernels --repeats=10 --out=out/gpu-kernels.json
timeout 90 python eval.py speed --attn=softmax,elastic,entmax,tda,sigmoid,gated_deltanet --lengths=1024 \
    --tokens=16384 --n_layer=12 --n_head=12 --n_embd=768 --vocab_size=50304 --memory= --repeats=5
timeout 1m python train.py --attn=softmax --max_iters=500 --out_dir=out/gpu-softmax
timeout 1m python train.py --attn=tda --max_iters=500 --out_dir=out/gpu-tda
timeout 30 python eval.py speed --live --out_dir=out/gpu-tda --lengths=1024,4096
