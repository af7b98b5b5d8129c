"""What weights cost: snapshots on disk, the barrier in a training loop, and syncs of real vLLM engines."""
