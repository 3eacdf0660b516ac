"""Other projects' names over this runtime: the package ``deepspeed``, the Trainer's callback."""
