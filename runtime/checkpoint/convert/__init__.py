"""Import checkpoints of DeepSpeed and Hugging Face into the format of this runtime."""
