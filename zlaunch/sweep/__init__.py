"""Try many values of a script's parameters: which ones, which runs go on, what came of them."""
