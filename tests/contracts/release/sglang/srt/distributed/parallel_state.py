def init_distributed_environment(world_size, rank, local_rank, distributed_init_method, backend):
    pass


def initialize_model_parallel(tensor_model_parallel_size=1, backend=None):
    pass
