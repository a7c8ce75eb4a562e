NPUS_PER_NODE=8
NNODES=4
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))
TP=8
PP=4
torchrun pretrain_gpt.py \
    --worker_num $WORLD_SIZE \
    --local_worker_num $NPUS_PER_NODE \
    --join \
    --cluster_time_out \
    --bind_core \
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --sequence-parallel \
    --use-mcore-models \
    --use-fused-swiglu \
    --use-fused-rotary-pos-emb \
    --num-layers 80 \
    --hidden-size 8192 \
    --ffn-hidden-size 28672 \
    --num-attention-heads 64 \
    --seq-length 4096 \
    --micro-batch-size 1 \
    --global-batch-size 1024 \
    --untie-embeddings-and-output-weights \
    --position-embedding-type rope \
    --normalization RMSNorm \
    --swiglu \
    --use-flash-attn \
    --no-gradient-accumulation-fusion \
    --disable-bias-linear \
    --group-query-attention \
    --num-query-groups 8 \
    --bf16 \
    --num-layers-per-virtual-pipeline-stage 5 \
    --ai-framework mindspore
