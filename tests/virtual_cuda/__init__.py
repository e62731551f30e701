"""A CUDA device without a GPU, for tests; see README.md. `device` must be imported before torch."""
