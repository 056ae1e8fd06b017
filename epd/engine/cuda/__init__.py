"""What the engine does on a CUDA device in half precision: FlashAttention over block tables, decode steps as graphs,
and copies through pinned memory. Everything but the kernel and the capture itself runs on a CPU too, for tests."""
