"""What the script holds: the module, its parameters, the optimizer, and checks of their use."""
