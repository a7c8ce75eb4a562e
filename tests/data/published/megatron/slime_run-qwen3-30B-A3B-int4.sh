source "${SCRIPT_DIR}/../models/qwen3-30B-A3B.sh"
   --global-batch-size 256
   --tensor-model-parallel-size 4
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 8
   --expert-tensor-parallel-size 1
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 8192
   --optimizer-cpu-offload
   --use-precision-aware-optimizer
RUNTIME_ENV_JSON="{
}"
   --actor-num-gpus-per-node 8 \
