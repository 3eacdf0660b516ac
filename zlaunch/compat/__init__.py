"""The `deepspeed` import alias and the glue for transformers and accelerate. Not there yet."""
