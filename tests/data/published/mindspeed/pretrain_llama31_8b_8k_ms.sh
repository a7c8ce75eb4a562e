TP=8
PP=1
DISTRIBUTED_ARGS="
"
GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --micro-batch-size 2 \
    --global-batch-size 64 \
    --sequence-parallel \
    --use-fused-rmsnorm \
    --num-layers 32 \
    --hidden-size 4096 \
    --ffn-hidden-size 14336 \
    --num-attention-heads 32 \
    --num-query-groups 8 \
    --seq-length 8192 \
    --untie-embeddings-and-output-weights \
    --swiglu \
    --bf16 \
"
