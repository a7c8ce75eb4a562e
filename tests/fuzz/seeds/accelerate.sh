#!/usr/bin/env bash
# llama-tiny with Accelerate 1.15; TRAIN is a program that takes the arguments of transformers' Trainer and
# --block_size, the tokens of a sample, as run_clm.py does. One that calls Accelerator itself finds how many
# micro-batches there are in the environment. What is given to the script goes to the program too.
# Runs on one node with 4 devices: TRAIN=train.py bash launch.sh
set -euo pipefail
export ACCELERATE_GRADIENT_ACCUMULATION_STEPS=1

accelerate launch --config_file "$(dirname "$0")/accelerate.yaml" \
  "${TRAIN:?}" \
  --per_device_train_batch_size 8 \
  --gradient_accumulation_steps 1 \
  --max_grad_norm 0 \
  --optim adamw_torch \
  --block_size 128 \
  "$@"
