source "${SCRIPT_DIR}/../../scripts/models/qwen3-4B-Instruct-2507.sh"
   --global-batch-size 256
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
NUM_GPUS=2
RUNTIME_ENV_JSON="{
}"
   --actor-num-gpus-per-node ${NUM_GPUS} \
