NPUS_PER_NODE=8
NNODES=2
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
TP=2
PP=2
CP=4
torchrun pretrain_gpt.py \
    --worker_num $WORLD_SIZE \
    --local_worker_num $NPUS_PER_NODE \
    --join \
    --cluster_time_out \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --context-parallel-algo megatron_cp_algo \
    --context-parallel-size ${CP} \
    --sequence-parallel \
    --use-mcore-models \
    --use-flash-attn \
    --use-fused-swiglu \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --use-cp-send-recv-overlap \
    --use-distributed-optimizer \
    --num-layers 40 \
    --hidden-size 4096 \
    --ffn-hidden-size 13696 \
    --num-attention-heads 32 \
    --seq-length 32768 \
    --micro-batch-size 1 \
    --global-batch-size 64 \
    --group-query-attention \
    --num-query-groups 2 \
    --disable-bias-linear \
    --add-qkv-bias \
    --position-embedding-type rope \
    --use-glm-rope \
    --rotary-percent 0.5 \
    --rotary-base 5000000 \
    --normalization RMSNorm \
    --swiglu \
    --norm-epsilon 1.5625e-07 \
    --untie-embeddings-and-output-weights \
    --no-gradient-accumulation-fusion \
    --bf16 \
    --ai-framework mindspore
