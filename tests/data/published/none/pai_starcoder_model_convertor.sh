python checkpoint_reshaping_and_interoperability.py \
--target_tensor_model_parallel_size ${TP} \
--target_pipeline_model_parallel_size ${PP} \
