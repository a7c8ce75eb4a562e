source "${SCRIPT_DIR}/models/qwen3-4B.sh"
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
   --runtime-env-json='{
   }' \
   --actor-num-gpus-per-node 8 \
