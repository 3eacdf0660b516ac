"""Trains in fp16 or bf16: compute dtypes, loss scaling, and the numbers of one step."""
