"""The only importers of vllm, ray, torch and verl, inside functions; and clients of their servers."""
