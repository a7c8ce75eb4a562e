#SBATCH --nodes=16
#SBATCH --gpus-per-node=4
MBS=1
GBS=128
SEQ_LEN=8192
TRANSFORMER_ENGINE_ARGS=(
	--transformer-impl transformer_engine
	--use-precision-aware-optimizer
	--main-grads-dtype bf16
)
NETWORK_SIZE_ARGS=(
	--num-layers 32
	--hidden-size 4096
	--ffn-hidden-size 14336
	--num-attention-heads 32
	--group-query-attention
	--num-query-groups 8
	--max-position-embeddings $SEQ_LEN
	--position-embedding-type rope
	--rotary-base 500000
	--use-rope-scaling
	--rope-scaling-factor 8
	--make-vocab-size-divisible-by 128
	--normalization RMSNorm
	--swiglu
	--untie-embeddings-and-output-weights
)
REGULARIZATION_ARGS=(
	--attention-dropout 0.0
	--hidden-dropout 0.0
	--clip-grad 1.0
)
TRAINING_ARGS=(
	--micro-batch-size $MBS
	--global-batch-size $GBS
	--cross-entropy-loss-fusion
	--disable-bias-linear
	--optimizer adam
)
MIXED_PRECISION_ARGS=(
	--bf16
)
DISTRIBUTED_ARGS=(
	--tensor-model-parallel-size 1
	--pipeline-model-parallel-size 1
	--use-distributed-optimizer
	--overlap-grad-reduce
	--overlap-param-gather
)
DATA_ARGS=(
	--seq-length $SEQ_LEN
)
if [ "$MOCK_DATA" = true ]; then
  DATA_ARGS="${DATA_ARGS[@]} --mock-data"
fi
TORCHRUN_ARGS=(
	--nproc-per-node $SLURM_GPUS_PER_NODE
	--nnodes $SLURM_NNODES
)
TRAINING_CMD="torchrun ${TORCHRUN_ARGS[@]} $MEGATRON_LM_DIR/pretrain_gpt.py \
    ${TRANSFORMER_ENGINE_ARGS[@]} \
    ${NETWORK_SIZE_ARGS[@]} \
    ${REGULARIZATION_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MIXED_PRECISION_ARGS[@]} \
    ${DISTRIBUTED_ARGS[@]} \
    $DATA_ARGS"
srun -lu bash -c "$CMD_PREFIX $TRAINING_CMD"
