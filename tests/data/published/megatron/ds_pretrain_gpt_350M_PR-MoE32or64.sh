EP_SIZE="32 32 32 32 32 32 32 32 32 32 64 64"
    DATA_BLEND="0.14336 ${B3} 0.08962 ${RN} 0.19336 ${OWT2} 0.05689 ${SE} \
         --data-impl mmap"
megatron_options=" \
        --tensor-model-parallel-size ${MP_SIZE} \
        --num-experts ${EP_SIZE} \
        --tensorboard-dir ${TENSORBOARD_DIR}"
