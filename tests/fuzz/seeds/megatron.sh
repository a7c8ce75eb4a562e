#!/usr/bin/env bash
# llama-tiny with Megatron-LM core 0.16; MEGATRON is the folder of its pretrain_gpt.py.
# Runs on one node with 4 devices: bash launch.sh
set -euo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1

torchrun --nnodes 1 --nproc-per-node 4 \
  "${MEGATRON:-.}/pretrain_gpt.py" \
  --num-layers 4 \
  --hidden-size 256 \
  --ffn-hidden-size 512 \
  --num-attention-heads 8 \
  --seq-length 128 \
  --max-position-embeddings 128 \
  --norm-epsilon 1e-05 \
  --attention-dropout 0 \
  --hidden-dropout 0 \
  --group-query-attention \
  --num-query-groups 4 \
  --untie-embeddings-and-output-weights \
  --swiglu \
  --normalization RMSNorm \
  --disable-bias-linear \
  --position-embedding-type rope \
  --rotary-base 500000 \
  --tokenizer-type NullTokenizer \
  --vocab-size 1023 \
  --make-vocab-size-divisible-by 128 \
  --tensor-model-parallel-size 2 \
  --pipeline-model-parallel-size 1 \
  --context-parallel-size 1 \
  --micro-batch-size 8 \
  --global-batch-size 16 \
  --optimizer adam \
  --clip-grad 0 \
  --mock-data \
  --train-iters 100 \
  --lr 0.0001 \
  --eval-iters 0 \
  "$@"
